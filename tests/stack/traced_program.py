"""A program that runs one workflow with two activities, replayed at each task; for its traces."""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta
from uuid import uuid4

from temporalio import activity, workflow
from temporalio.worker import Worker

with workflow.unsafe.imports_passed_through():
    from muster import exit as way_out
    from muster import telemetry
    from muster.connection import connect_to


@activity.defn
async def greet(name: str) -> str:
    """Return a greeting."""
    return f"hello {name}"


@workflow.defn
class Traced:
    """Greets twice."""

    @workflow.run
    async def run(self) -> list[str]:
        """Run both activities, one after the other."""
        return [
            await workflow.execute_activity(
                greet, name, start_to_close_timeout=timedelta(seconds=10)
            )
            for name in ("a", "b")
        ]


async def main(address: str) -> int:
    """Run worker and client in one process."""
    telemetry.configure("traced")
    client = await connect_to(address)
    queue = f"traced-{uuid4()}"
    async with Worker(
        client,
        task_queue=queue,
        workflows=[Traced],
        activities=[greet],
        max_cached_workflows=0,
        max_concurrent_workflow_tasks=1,
    ):
        await client.execute_workflow(Traced.run, id=queue, task_queue=queue)
    return 0


if __name__ == "__main__":
    way_out.run(lambda: asyncio.run(main(sys.argv[1])))
