"""Kill an engine's processes once the process that owns them is gone, however it went.

vLLM runs the model in child processes of the service. A service that is killed outright cannot
stop them, and they live on with the device's memory in hand. The guardian is a small process in a
session of its own that is told their ids and waits for its standard input to close, which the
kernel does when the service dies. Then it kills them and everything below them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SWEEP_S = 5.0
"""How long the guardian looks for processes that are still being born."""


class Guardian:
    """Guards the `multiprocessing` children that appear between `start` and `close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._known: set[int] = set()

    def start(self) -> None:
        """Begin to guard; children that live already are someone else's."""
        self._known = _children()
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def adopt(self) -> None:
        """Take in the children that have appeared since the last call."""
        assert self._process is not None
        assert self._process.stdin is not None
        new = _children() - self._known
        self._known |= new
        for child in sorted(new):
            self._process.stdin.write(f"{child}\n".encode())
        self._process.stdin.flush()

    def close(self) -> None:
        """Kill what is left of the guarded processes, and stop guarding; idempotent."""
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()


def descendants(process: int) -> list[int]:
    """Return the ids of a process's children, their children, and so on."""
    try:
        tasks = list(Path(f"/proc/{process}/task").iterdir())
        children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    except OSError:
        return []
    return [*children, *(below for child in children for below in descendants(child))]


def _children() -> set[int]:
    return {child.pid for child in multiprocessing.active_children() if child.pid is not None}


def _guard() -> None:
    """Read ids until the owner is gone, then kill those processes and what is below them.

    A descriptor per process keeps its id from meaning another process later.
    """
    guarded: dict[int, int] = {}
    for line in sys.stdin.buffer:
        with contextlib.suppress(ProcessLookupError):
            guarded[int(line)] = os.pidfd_open(int(line))
    deadline = time.monotonic() + SWEEP_S
    while guarded and time.monotonic() < deadline:
        for process, descriptor in list(guarded.items()):
            below = descendants(process)
            try:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            except ProcessLookupError:
                del guarded[process]
                continue
            for child in below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.02)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _guard()
