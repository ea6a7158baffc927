"""Health check of a worker's container: does the worker in it poll its task queue?

`python health.py [QUEUE]`: status 0 if the Temporal server has seen a poller of this host on the
queue lately; QUEUE is what the container's first process was started for (`muster worker QUEUE`).
It asks the server, since a worker's process can live on while its connection is gone.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from pathlib import Path

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest

from contracts.error import UnavailableError
from contracts.name import AGENTS_QUEUE, TOOLS_QUEUE
from muster import exit as program_exit
from muster.connection import connect
from muster.settings import load_settings

FRESH_S = 150
"""A poll is held open for up to 60 s, so a healthy poller shows at least that often."""


async def check(queue: str) -> None:
    """Raise UnavailableError unless a worker on this host has polled `queue` lately."""
    client = await connect(load_settings(), role="health")
    kind = (
        TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW
        if queue == AGENTS_QUEUE
        else TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY
    )
    found = await client.workflow_service.describe_task_queue(
        DescribeTaskQueueRequest(
            namespace=client.namespace, task_queue=TaskQueue(name=queue), task_queue_type=kind
        )
    )
    here = f"@{socket.gethostname()}"
    polls = [p.last_access_time.seconds for p in found.pollers if p.identity.endswith(here)]
    if not polls or time.time() - max(polls) > FRESH_S:
        raise UnavailableError(
            f"no worker on {here[1:]!r} has polled task queue {queue!r} in {FRESH_S} s"
        )


def own_queue() -> str:
    """Return the queue that this container's worker polls."""
    words = Path("/proc/1/cmdline").read_text().split("\0")
    return TOOLS_QUEUE if "tools" in words else AGENTS_QUEUE


if __name__ == "__main__":
    queue = sys.argv[1] if len(sys.argv) > 1 else own_queue()
    program_exit.run(lambda: asyncio.run(check(queue)))
