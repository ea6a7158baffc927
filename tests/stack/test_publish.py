"""What a supervisor cannot show keeps it from nothing, and is shown as soon as it can be."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from muster.settings import load_settings
from muster.stack import supervisor
from muster.stack.state import StackRecord, make_data_dir, read_record
from muster.stack.supervisor import Supervisor


def _full(data_dir: Path, record: StackRecord) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_full_disk_is_no_error_and_what_was_not_written_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_settings(data_dir=tmp_path / "data")
    make_data_dir(settings)
    shown = asyncio.Event()

    def changed(record: StackRecord) -> None:
        shown.set()
        raise BrokenPipeError

    stack = Supervisor(settings, only={"agents"}, changed=changed)
    monkeypatch.setattr(supervisor, "LATE_S", 0.01)
    with monkeypatch.context() as full:
        full.setattr(supervisor, "write_record", _full)
        stack._publish()
    assert read_record(settings.data_dir) is None
    assert shown.is_set()

    shown.clear()
    async with asyncio.timeout(10):
        await shown.wait()
    assert read_record(settings.data_dir) == stack.record()
