"""A workflow that makes one tool call, and a tool worker to run it: what Temporal sees of a tool.

`python -m tests.activities.one_call ADDRESS DATABASE_URL QUEUE` is a tool worker that may be
killed.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from datetime import timedelta

from temporalio import workflow
from temporalio.client import Client
from temporalio.common import RetryPolicy
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Worker

with workflow.unsafe.imports_passed_through():
    from activities.toolbox import Toolbox
    from activities.worker import tool_activities
    from contracts.name import CALL_TOOL
    from contracts.tool import CallToolInput, CallToolResult
    from store.database import Database

HEARTBEAT_TIMEOUT = timedelta(seconds=6)
"""Just above the interval at which a running call heartbeats."""


@dataclass
class OneCall:
    """Input of the workflow: the call, and the queue of its tool worker."""

    call: CallToolInput
    queue: str


@workflow.defn
class OneCallWorkflow:
    """Makes one tool call."""

    @workflow.run
    async def run(self, one: OneCall) -> CallToolResult:
        """Return the result."""
        result: CallToolResult = await workflow.execute_activity(
            CALL_TOOL,
            one.call,
            result_type=CallToolResult,
            task_queue=one.queue,
            start_to_close_timeout=timedelta(minutes=1),
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
            retry_policy=RetryPolicy(initial_interval=timedelta(milliseconds=100)),
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        )
        return result


def tool_worker(client: Client, database: Database, queue: str) -> Worker:
    """Return a tool worker on a queue of its own."""
    return Worker(
        client,
        task_queue=queue,
        activities=tool_activities(database, Toolbox()),
        graceful_shutdown_timeout=timedelta(milliseconds=100),
    )


async def main(address: str, database_url: str, queue: str) -> None:
    """Run a tool worker until it is killed."""
    client = await Client.connect(address, data_converter=pydantic_data_converter)
    await tool_worker(client, Database(database_url), queue).run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
