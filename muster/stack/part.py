"""What the supervisor knows of a part of the stack, whichever it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from contracts.error import UnavailableError
from muster.stack.process import ChildProcess, Command, describe_status

POLL_INTERVAL_S = 0.1
"""Pause between two health checks while a part starts."""


class Part(Protocol):
    """One child of the supervisor: how it starts, when it is healthy, where it is reached."""

    @property
    def name(self) -> str:
        """Name in the table, the state file and the log file."""
        ...

    @property
    def address(self) -> str:
        """Where others reach it; empty if nowhere."""
        ...

    async def prepare(self) -> None:
        """Make what the process needs before each start (directories, leftovers removed)."""
        ...

    def command(self) -> Command:
        """Return how to start it now."""
        ...

    async def check(self, pid: int) -> None:
        """Raise UnavailableError unless the process `pid` does its work."""
        ...


async def start_part(part: Part, log: Path, timeout_s: float) -> ChildProcess:
    """Start a part and wait until it is healthy.

    Raises UnavailableError if it ends first, or is not healthy after `timeout_s` seconds; it does
    not run then.
    """
    await part.prepare()
    child = ChildProcess.start(part.command(), log)
    try:
        await wait_healthy(lambda: part.check(child.pid), child, part.name, log, timeout_s)
    except BaseException:
        await child.kill()
        raise
    return child


async def wait_healthy(
    check: Callable[[], Awaitable[None]],
    child: ChildProcess,
    name: str,
    log: Path,
    timeout_s: float,
) -> None:
    """Wait until `check` passes, the child ends (UnavailableError) or time is up (the same)."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    reason = ""
    while True:
        if (status := child.returncode) is not None:
            raise UnavailableError(
                f"{name} ended with {describe_status(status)} while it started", hint=f"see {log}"
            )
        try:
            return await asyncio.wait_for(check(), max(0.1, deadline - _now()))
        except UnavailableError as error:
            reason = error.message
        except TimeoutError:
            reason = reason or "its health check does not answer"
        if _now() > deadline:
            raise UnavailableError(
                f"{name} is not healthy after {timeout_s:.0f} s: {reason}", hint=f"see {log}"
            )
        await asyncio.sleep(POLL_INTERVAL_S)


def _now() -> float:
    return asyncio.get_running_loop().time()
