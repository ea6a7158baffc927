"""Supervision of one part: a limit on restarts, and a part that lives but does not work."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from contracts.error import UnavailableError
from muster.stack import supervised
from muster.stack.process import Command
from muster.stack.state import PartState
from muster.stack.supervised import SupervisedPart

SLEEPS = "import time; time.sleep(600)"


class Program:
    """A part that is a small program; `is_well` is what its health check says once it is up."""

    name = "program"
    address = ""

    def __init__(self, directory: Path, code: str = SLEEPS) -> None:
        self.directory = directory
        self.code = code
        self.is_well = True

    async def prepare(self) -> None:
        """Need nothing."""

    def command(self) -> Command:
        """Return how to start the program."""
        return Command(argv=[sys.executable, "-I", "-S", "-c", self.code], cwd=self.directory)

    async def check(self, pid: int) -> None:
        """Find it well as soon as it runs."""

    async def watch(self) -> None:
        """Raise UnavailableError if it is made to be ill."""
        if not self.is_well:
            raise UnavailableError("ill")


async def until(condition: Callable[[], bool], timeout_s: float = 100.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(supervised, "MAX_BACKOFF_S", 0.02)
    monkeypatch.setattr(supervised, "RESTART_LIMIT", 4)
    monkeypatch.setattr(supervised, "CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr(supervised, "UNHEALTHY_LIMIT_S", 0.3)


async def test_part_that_always_dies_is_given_up_with_its_log_named(tmp_path: Path) -> None:
    states: list[PartState] = []
    program = Program(tmp_path, "raise SystemExit(3)")
    part = SupervisedPart(program, tmp_path / "log", 5.0, lambda: states.append(part.record.state))
    await part.start()
    await until(lambda: part.record.state is PartState.FAILED)
    assert str(tmp_path / "log") in part.record.message
    assert part.record.restarts == 3
    assert PartState.RESTARTING in states
    await part.stop()


async def test_part_that_is_ill_for_long_is_killed_and_started_again(tmp_path: Path) -> None:
    program = Program(tmp_path)
    part = SupervisedPart(program, tmp_path / "log", 5.0, lambda: None)
    await part.start()
    first = part.record.pid
    program.is_well = False
    await until(lambda: part.record.message == "unhealthy: ill")
    await until(lambda: part.record.restarts == 1)
    program.is_well = True
    await until(lambda: part.record.state is PartState.UP and part.record.message == "")
    assert part.record.pid != first
    await part.stop()
    assert part.record.state is PartState.STOPPED


async def test_illness_that_passes_restarts_nothing(tmp_path: Path) -> None:
    program = Program(tmp_path)
    part = SupervisedPart(program, tmp_path / "log", 5.0, lambda: None)
    await part.start()
    program.is_well = False
    await until(lambda: part.record.message != "")
    program.is_well = True
    await until(lambda: part.record.message == "")
    assert part.record.restarts == 0
    await part.stop()


async def test_part_that_ends_while_it_starts_fails_the_start(tmp_path: Path) -> None:
    class Slow(Program):
        async def check(self, pid: int) -> None:
            raise UnavailableError("not yet")

    part = SupervisedPart(
        Slow(tmp_path, "import sys; sys.exit('error: no luck\\nhint: try again')"),
        tmp_path / "log",
        5.0,
        lambda: None,
    )
    with pytest.raises(UnavailableError) as raised:
        await part.start()
    assert raised.value.message == "program: no luck"
    assert raised.value.hint == f"try again (log: {tmp_path / 'log'})"


async def test_part_that_is_never_well_fails_the_start_and_is_stopped(tmp_path: Path) -> None:
    class Never(Program):
        async def check(self, pid: int) -> None:
            raise UnavailableError("not yet")

    part = SupervisedPart(Never(tmp_path), tmp_path / "log", 0.3, lambda: None)
    with pytest.raises(UnavailableError, match="not healthy after 0 s: not yet"):
        await part.start()
    await part.stop()
