"""A child process that cannot outlive its parent, in a process group of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from contracts.error import UnavailableError
from muster.stack.guard import guard

_LAUNCH = Path(__file__).with_name("launch.py")

MAX_CHILDREN = 32
"""Children of one process at a time; each has a thread that waits for its end."""

_waiters = ThreadPoolExecutor(max_workers=MAX_CHILDREN, thread_name_prefix="child")


@dataclass(frozen=True, slots=True)
class User:
    """A system user to run as."""

    name: str
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Command:
    """How a child is started and stopped.

    `death_signal` is what it gets when its parent dies. `stop_signal` asks it to end; after
    `stop_timeout_s` seconds it is killed.
    """

    argv: Sequence[str]
    cwd: Path
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    user: User | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    stop_timeout_s: float = 10.0
    death_signal: signal.Signals = signal.SIGKILL


class ChildProcess:
    """One running child; `wait` as often as wanted, `stop` or `kill` to end it."""

    def __init__(self, command: Command, popen: subprocess.Popen[bytes]) -> None:
        self._command = command
        self._popen = popen
        self.pid = popen.pid
        self._end = asyncio.get_running_loop().run_in_executor(_waiters, _reap, popen)

    @classmethod
    def start(cls, command: Command, log: Path) -> ChildProcess:
        """Start the child with its output appended to `log`; nothing is awaited in between."""
        user = command.user
        launch = [sys.executable, "-I", "-S", str(_LAUNCH), str(os.getpid())]
        launch += [str(int(command.death_signal))]
        launch += [str(user.uid), str(user.gid)] if user else ["-1", "-1"]
        with log.open("ab") as output:
            popen = subprocess.Popen(
                [*launch, *command.argv],
                cwd=command.cwd,
                env=dict(command.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # One that dies with us in a way of its own takes its group along itself.
        guard.add(popen.pid, group=command.death_signal == signal.SIGKILL)
        return cls(command, popen)

    @property
    def returncode(self) -> int | None:
        """Exit status; negative for the signal that ended it; None while it runs."""
        return self._end.result() if self._end.done() else None

    async def wait(self) -> int:
        """Wait for the end and return the exit status."""
        return await asyncio.shield(self._end)

    async def stop(self) -> int:
        """Ask the child to end, kill what does not within its time, and return the exit status."""
        self._signal(self._command.stop_signal)
        return await self.wait_at_most(self._command.stop_timeout_s)

    async def wait_at_most(self, timeout_s: float) -> int:
        """Wait for the end, kill the child after `timeout_s` seconds; return the exit status."""
        try:
            return await asyncio.wait_for(self.wait(), timeout_s)
        except TimeoutError:
            return await self.kill()
        except asyncio.CancelledError:
            await self.kill()
            raise

    async def kill(self) -> int:
        """End the child and its group at once and return the exit status."""
        self.kill_now()
        return await self.wait()

    def kill_now(self) -> None:
        """Kill the child and its group without waiting for their end."""
        if not self._end.done():
            _kill_group(self.pid)

    def _signal(self, number: signal.Signals) -> None:
        if not self._end.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


async def run_briefly(command: Command, timeout_s: float = 5.0) -> str:
    """Run a program to its end and return the first line it printed.

    Raises UnavailableError if it fails or takes longer than `timeout_s` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="muster-") as directory:
        output = Path(directory) / "output"
        status = await ChildProcess.start(command, output).wait_at_most(timeout_s)
        text = output.read_text(errors="replace").strip()
    if status != 0:
        raise UnavailableError(
            f"{command.argv[0]} ended with {describe_status(status)}: {text[-200:]}",
            hint="install it again",
        )
    return text.partition("\n")[0]


def _reap(popen: subprocess.Popen[bytes]) -> int:
    """Wait for a child's end, kill what is left of its group, and return its exit status."""
    with contextlib.suppress(ChildProcessError):
        # Its pid stays its own until the child is reaped, so the group cannot be another's.
        os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
    _kill_group(popen.pid)
    status = popen.wait()
    guard.remove(popen.pid)
    return status


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def describe_status(status: int) -> str:
    """Return an exit status in words: `status 1`, or `signal SIGKILL`."""
    if status >= 0:
        return f"status {status}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-status).name}"
    return f"signal {-status}"
