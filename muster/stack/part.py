"""What the supervisor knows of a part of the stack, whichever it is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

from contracts.error import UnavailableError
from muster.stack.log_file import last_line_since, said_since, size_of
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
        """Raise UnavailableError unless the process `pid`, just started, does its work."""
        ...

    async def watch(self) -> None:
        """Raise UnavailableError if the process, once healthy, does not do its work any more."""
        ...


async def start_part(part: Part, log: Path, timeout_s: float) -> ChildProcess:
    """Start a part and wait until it is healthy.

    Raises UnavailableError if it ends first (with the error it reported, or what it said last), or
    is not healthy after `timeout_s` seconds; it does not run then.
    """
    await part.prepare()
    offset = size_of(log)
    child = ChildProcess.start(part.command(), log)
    try:
        await _wait_healthy(part, child, log, timeout_s)
    except UnavailableError as error:
        ended = child.returncode is not None
        await child.kill()
        if not ended:
            raise
        if said := said_since(log, offset):
            hint = f"{said.hint} (log: {log})" if said.hint else f"see {log}"
            raise UnavailableError(f"{part.name}: {said.message}", hint=hint) from error
        last = last_line_since(log, offset) or "it said nothing"
        raise UnavailableError(f"{error.message}: {last}", hint=error.hint) from error
    except BaseException:
        await child.kill()
        raise
    return child


async def _wait_healthy(part: Part, child: ChildProcess, log: Path, timeout_s: float) -> None:
    """Wait until the check passes; raise UnavailableError if the child ends or time is up."""
    now = asyncio.get_running_loop().time
    deadline = now() + timeout_s
    reason = "its health check does not answer"
    while now() < deadline:
        if (status := child.returncode) is not None:
            raise UnavailableError(
                f"{part.name} ended with {describe_status(status)} while it started",
                hint=f"see {log}",
            )
        try:
            return await asyncio.wait_for(part.check(child.pid), deadline - now())
        except UnavailableError as error:
            reason = error.message
        except TimeoutError:
            break
        await asyncio.sleep(POLL_INTERVAL_S)
    raise UnavailableError(
        f"{part.name} is not healthy after {timeout_s:.0f} s: {reason}", hint=f"see {log}"
    )
