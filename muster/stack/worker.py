"""The worker processes as parts of the stack: agent worker, tool worker, inference service."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx

from contracts.error import UnavailableError
from muster.connection import connect
from muster.settings import Settings
from muster.stack.process import Command
from muster.stack.queue import QUEUES, poller_pids, queues_of

CHECK_TIMEOUT_S = 2.0
KILL_MARGIN_S = 5.0
"""A worker that drains gets this much longer than its drain before it is killed."""


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """The `agents` or the `tools` worker; it finds the embedded servers as every command does."""

    name: str
    settings: Settings

    @property
    def address(self) -> str:
        """The task queue it polls."""
        return f"task queue {QUEUES[self.name][0]}"

    async def prepare(self) -> None:
        """Need nothing."""

    def command(self) -> Command:
        """Return how to start the worker."""
        return worker_command(self.name, self.settings)

    async def check(self, pid: int) -> None:
        """Raise UnavailableError unless the process is among the pollers of its task queues."""
        client = await connect(self.settings, role="stack")
        for queue, kind in queues_of(self.name, self.settings):
            if pid not in await poller_pids(client, queue, kind):
                raise UnavailableError(f"process {pid} does not poll task queue {queue} yet")

    async def watch(self) -> None:
        """Need nothing: a worker whose servers are away reconnects, or ends."""


@dataclass(frozen=True, slots=True)
class InferencePart:
    """The inference service."""

    settings: Settings

    @property
    def name(self) -> str:
        """Name of the part."""
        return "inference"

    @property
    def address(self) -> str:
        """URL of its HTTP surface."""
        return f"http://127.0.0.1:{self.settings.inference_port}"

    async def prepare(self) -> None:
        """Need nothing."""

    def command(self) -> Command:
        """Return how to start the service."""
        return worker_command(self.name, self.settings)

    async def check(self, pid: int) -> None:
        """Raise UnavailableError unless the service says that it is healthy."""
        await check_inference(self.address)

    async def watch(self) -> None:
        """Raise UnavailableError if the service is not healthy any more."""
        await check_inference(self.address)


async def check_inference(url: str) -> None:
    """Raise UnavailableError unless the inference service at `url` says that it is healthy."""
    await _get(url, "/health")


async def inference_stats(url: str) -> dict[str, object]:
    """Return the inference service's statistics, or raise UnavailableError."""
    response = await _get(url, "/stats")
    stats: dict[str, object] = response.json()
    return stats


async def inference_cohorts(url: str) -> dict[str, object]:
    """Return what the inference service's scheduler sees, or raise UnavailableError."""
    response = await _get(url, "/cohorts")
    cohorts: dict[str, object] = response.json()
    return cohorts


def worker_command(name: str, settings: Settings) -> Command:
    """Return how to start `muster worker NAME` with exactly these settings."""
    root = str(Path(__file__).resolve().parents[2])
    path = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    path = [str(Path(part).resolve()) for part in path]
    environment = {
        **os.environ,
        **settings.environment(),
        # The packages that this process runs on, wherever it was started.
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([root, *path])),
        "PYTHONUNBUFFERED": "1",
        # `python -m` would put the current directory before everything else.
        "PYTHONSAFEPATH": "1",
    }
    return Command(
        argv=[sys.executable, "-m", "muster", "worker", name],
        cwd=Path.cwd(),
        environment=environment,
        stop_timeout_s=settings.drain_timeout.total_seconds() + KILL_MARGIN_S,
    )


async def _get(url: str, path: str) -> httpx.Response:
    try:
        async with httpx.AsyncClient(timeout=CHECK_TIMEOUT_S, trust_env=False) as client:
            response = await client.get(url.rstrip("/") + path)
            response.raise_for_status()
            return response
    except (httpx.HTTPError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise UnavailableError(f"no inference service answers at {url}: {reason}") from error
