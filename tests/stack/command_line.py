"""The command line as a person uses it, with a data directory and ports of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from muster.stack.port import free_port
from muster.stack.postgres import PostgresPart

COMMAND_TIMEOUT_S = 300.0
SERVERS = "temporal,postgres"


class CommandLine:
    """Runs `muster …` with a data directory and ports of its own."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.temporal_port = free_port()
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("MUSTER_")},
            "MUSTER_DATA_DIR": str(data_dir),
            "MUSTER_TEMPORAL_PORT": str(self.temporal_port),
            "MUSTER_TEMPORAL_UI_PORT": str(free_port()),
            "MUSTER_INFERENCE_PORT": str(free_port()),
            "MUSTER_ENGINE": "simulated",
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        }

    def run(
        self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; `environment` is added to its own."""
        return subprocess.run(
            [sys.executable, "-m", "muster", *arguments],
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command and return at once."""
        return subprocess.Popen(
            [sys.executable, "-m", "muster", *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def up(self, only: str = SERVERS) -> None:
        """Bring these parts up in the background."""
        done = self.run("up", "--detach", "--only", only)
        assert done.returncode == 0, done.stdout + done.stderr

    def status(self) -> dict[str, Any]:
        """Return what `muster status --json` prints."""
        shown: dict[str, Any] = json.loads(self.run("status", "--json").stdout)
        return shown

    def part(self, name: str) -> dict[str, Any]:
        """Return one part's entry of the state file."""
        record = json.loads((self.data_dir / "stack.json").read_text())
        part: dict[str, Any] = next(part for part in record["parts"] if part["name"] == name)
        return part

    def supervisor(self) -> psutil.Process:
        """Return the supervisor's process."""
        return psutil.Process(int((self.data_dir / "stack.lock").read_text()))

    def processes(self) -> list[psutil.Process]:
        """Return the supervisor and everything under it."""
        supervisor = self.supervisor()
        return [supervisor, *supervisor.children(recursive=True)]

    def end(self) -> None:
        """Stop whatever still runs, and remove what it keeps outside its data directory."""
        self.run("down")
        part = PostgresPart(self.data_dir / "postgres", Path(os.devnull), None)
        shutil.rmtree(part.socket_dir, ignore_errors=True)


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until `condition` holds, or fail after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not true after {timeout_s} s"
        time.sleep(0.02)


def is_gone(process: psutil.Process) -> bool:
    """Tell whether a process has ended, reaped or not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE or not process.is_running()
    return True


def kill(pid: int) -> None:
    """Kill a process as a crash would."""
    os.kill(pid, signal.SIGKILL)
