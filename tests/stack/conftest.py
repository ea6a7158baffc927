"""A stack of its own for a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack.command_line import CommandLine


@pytest.fixture
def muster(tmp_path: Path) -> Iterator[CommandLine]:
    """Return a command line whose stack, if one was started, is stopped at the end."""
    command_line = CommandLine(tmp_path / "data")
    yield command_line
    command_line.end()
