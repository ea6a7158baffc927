"""Kill an engine's processes once the process that owns them is gone, however it went.

vLLM runs the model in child processes of the service. A service that is killed outright cannot
stop them, and they would keep the device's memory. The guardian is a small process in a session of
its own that waits for its standard input to close, which the kernel does when the service dies. It
then kills every process whose environment carries its mark; the engine's children inherit that
environment because they are spawned, not forked.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

MARK = "MUSTER_ENGINE_MARK"
"""Environment variable that names the owner of an engine's processes."""

SWEEP_S = 10.0
"""How long the guardian looks for processes that are still being born."""


class Guardian:
    """Guards the processes spawned between `start` and `close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Mark the environment of processes spawned from now on, and begin to watch."""
        mark = uuid.uuid4().hex
        environment = {key: value for key, value in os.environ.items() if key != MARK}
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", str(Path(__file__).resolve()), mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        os.environ[MARK] = mark

    def close(self) -> None:
        """Kill what is left of the marked processes, and stop watching; idempotent."""
        if self._process is None:
            return
        process, self._process = self._process, None
        os.environ.pop(MARK, None)
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def marked_processes(mark: str) -> list[int]:
    """Return the ids of the processes whose environment carries `mark`."""
    entry = f"{MARK}={mark}".encode()
    found: list[int] = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            if entry in (directory / "environ").read_bytes().split(b"\0"):
                found.append(int(directory.name))
        except OSError:
            continue  # gone meanwhile, or another user's
    return found


def sweep(mark: str) -> None:
    """Kill marked processes until there are none, for at most `SWEEP_S` seconds."""
    deadline = time.monotonic() + SWEEP_S
    while (processes := marked_processes(mark)) and time.monotonic() < deadline:
        for process in processes:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdin.buffer.read()
    sweep(sys.argv[1])
