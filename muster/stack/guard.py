"""Makes sure that nothing this process starts can be left behind, however either of them ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil

_SENTINEL = Path(__file__).with_name("sentinel.py")
_PR_SET_CHILD_SUBREAPER = 36


class Guard:
    """Knows this process's children; `start` is for a process that has no others.

    While started, grandchildren whose parent dies become our children, so that `kill_orphans`
    finds them, and a sentinel kills the groups of our children should we be killed.
    """

    def __init__(self) -> None:
        self._children: set[int] = set()
        self._groups: set[int] = set()
        self._sentinel: subprocess.Popen[bytes] | None = None
        self._lock = threading.RLock()
        self._ended = threading.Condition(self._lock)

    def start(self) -> None:
        """Begin to guard, until `stop`."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        with self._lock:
            self._start_sentinel()

    def stop(self) -> None:
        """Let the sentinel go and wait for its end; groups that still run are killed."""
        with self._lock:
            sentinel, self._sentinel = self._sentinel, None
        if sentinel:
            assert sentinel.stdin
            with contextlib.suppress(BrokenPipeError):
                sentinel.stdin.close()
            sentinel.wait()
            self._children.discard(sentinel.pid)

    def add(self, pid: int, *, group: bool) -> None:
        """Know a new child; with `group`, its process group is killed if we are."""
        with self._lock:
            self._children.add(pid)
            if group:
                self._groups.add(pid)
                self._tell(f"+{pid}\n")

    def remove(self, pid: int) -> None:
        """Forget a child that has ended; any thread may call this."""
        with self._lock:
            self._children.discard(pid)
            self._ended.notify_all()
            if pid in self._groups:
                self._groups.remove(pid)
                self._tell(f"-{pid}\n")

    def kill_all(self, timeout_s: float) -> None:
        """Kill all children and their groups, and wait until they have been reaped elsewhere."""
        with self._lock:
            for pid in self._children - self._sentinels():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            self._ended.wait_for(lambda: self._children == self._sentinels(), timeout_s)

    def kill_orphans(self) -> None:
        """Kill and reap what dead children have left behind, whatever group it is in.

        Does nothing unless started: elsewhere a child that we do not know is somebody else's.
        """
        if not self._sentinel:
            return
        while orphans := [
            process for process in psutil.Process().children() if process.pid not in self._children
        ]:
            # Their own children become ours in turn.
            for process in orphans:
                with contextlib.suppress(psutil.Error, ChildProcessError):
                    process.kill()
                    os.waitpid(process.pid, 0)

    def _sentinels(self) -> set[int]:
        return {self._sentinel.pid} if self._sentinel else set()

    def _start_sentinel(self) -> None:
        self._sentinel = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SENTINEL)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._children.add(self._sentinel.pid)
        for pid in self._groups:
            self._tell(f"+{pid}\n")

    def _tell(self, line: str) -> None:
        """Write one line to the sentinel; replace one that has died."""
        if not self._sentinel:
            return
        assert self._sentinel.stdin
        try:
            os.write(self._sentinel.stdin.fileno(), line.encode())
        except BrokenPipeError:
            self._sentinel.wait()
            self._children.discard(self._sentinel.pid)
            self._start_sentinel()


guard = Guard()
"""The one of this process."""
