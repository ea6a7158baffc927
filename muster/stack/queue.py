"""Task queues as the Temporal server sees them: who polls them, and how much waits there."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import (
    DescribeTaskQueueRequest,
    DescribeTaskQueueResponse,
)
from temporalio.client import Client
from temporalio.service import RPCError

from contracts.error import UnavailableError
from contracts.name import AGENTS_QUEUE, TOOLS_QUEUE, tool_queue
from muster.settings import Settings

CHECK_TIMEOUT = timedelta(seconds=2)

ACTIVITY = TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY

QUEUES = {
    "agents": (AGENTS_QUEUE, TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW),
    "tools": (TOOLS_QUEUE, ACTIVITY),
}
"""The queue that each role of a worker always polls."""


def queues_of(role: str, settings: Settings) -> list[tuple[str, TaskQueueType.ValueType]]:
    """Return all queues that a worker of this role polls."""
    groups = settings.tool_groups if role == "tools" else ()
    return [QUEUES[role], *((tool_queue(group), ACTIVITY) for group in groups)]


async def poller_pids(
    client: Client, queue: str, kind: TaskQueueType.ValueType
) -> Mapping[int, str]:
    """Return the identity, by process id, of each of our processes that polls a task queue."""
    pids: dict[int, str] = {}
    for identity in await pollers(client, queue, kind):
        _, _, process = identity.rpartition("/")
        pid = process.partition("@")[0]
        if pid.isdigit():
            pids[int(pid)] = identity
    return pids


async def pollers(client: Client, queue: str, kind: TaskQueueType.ValueType) -> list[str]:
    """Return the identities of all that polled a task queue in the last minutes.

    Raises UnavailableError.
    """
    return [each.identity for each in (await _describe(client, queue, kind)).pollers]


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
        return await client.workflow_service.describe_task_queue(request, timeout=CHECK_TIMEOUT)
    except RPCError as error:
        raise UnavailableError(f"Temporal cannot describe {queue!r}: {error.message}") from error
