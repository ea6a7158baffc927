"""The worker processes as parts of the stack: agent worker, tool worker, inference service."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import httpx
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import (
    DescribeTaskQueueRequest,
    DescribeTaskQueueResponse,
)
from temporalio.client import Client
from temporalio.service import RPCError

from contracts.error import UnavailableError
from contracts.name import AGENTS_QUEUE, TOOLS_QUEUE
from muster.connection import connect
from muster.settings import Settings
from muster.stack.process import Command

CHECK_TIMEOUT_S = 2.0
KILL_MARGIN_S = 5.0
"""A worker that drains gets this much longer than its drain before it is killed."""

QUEUES = {
    "agents": (AGENTS_QUEUE, TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW),
    "tools": (TOOLS_QUEUE, TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY),
}


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
        """Raise UnavailableError unless the process is among the pollers of its task queue."""
        client = await connect(self.settings, role="stack")
        if pid not in await poller_pids(client, *QUEUES[self.name]):
            raise UnavailableError(f"process {pid} does not poll {self.address} yet")

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


async def poller_pids(
    client: Client, queue: str, kind: TaskQueueType.ValueType
) -> Mapping[int, str]:
    """Return the identity, by process id, of each of our processes that polls a task queue."""
    found = await _describe(client, queue, kind)
    pids: dict[int, str] = {}
    for poller in found.pollers:
        _, _, process = poller.identity.rpartition("/")
        pid = process.partition("@")[0]
        if pid.isdigit():
            pids[int(pid)] = poller.identity
    return pids


async def waiting_tasks(client: Client, queue: str, kind: TaskQueueType.ValueType) -> int:
    """Return about how many tasks wait on a task queue because no worker has room for them."""
    return (await _describe(client, queue, kind)).stats.approximate_backlog_count


async def _describe(
    client: Client, queue: str, kind: TaskQueueType.ValueType
) -> DescribeTaskQueueResponse:
    request = DescribeTaskQueueRequest(
        namespace=client.namespace,
        task_queue=TaskQueue(name=queue),
        task_queue_type=kind,
        report_stats=True,
    )
    try:
        return await client.workflow_service.describe_task_queue(
            request, timeout=timedelta(seconds=CHECK_TIMEOUT_S)
        )
    except RPCError as error:
        raise UnavailableError(f"Temporal cannot describe {queue!r}: {error.message}") from error


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
