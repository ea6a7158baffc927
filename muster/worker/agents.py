"""The agent worker: runs the workflows of all jobs, and archives the histories of closed ones."""

from __future__ import annotations

import asyncio

from temporalio.worker import Worker

from contracts.name import AGENTS_QUEUE
from muster.archiver import POOL_SIZE, Archiver
from muster.connection import connect
from muster.database_url import database_url
from muster.settings import Settings
from muster.stack.namespace import check_namespace
from muster.worker.lifecycle import run_until, stop_event
from store.database import Database
from workflows.worker import workflow_options


async def main(settings: Settings) -> None:
    """Run until SIGTERM. Raises BadInputError if namespace or database is not prepared."""
    stop = stop_event()
    client = await connect(settings, role="agents")
    await check_namespace(client)
    database = Database(database_url(settings), pool_size=POOL_SIZE)
    try:
        await database.check()
        archiving = asyncio.create_task(Archiver(client, database).run())
        worker = Worker(
            client,
            task_queue=AGENTS_QUEUE,
            **workflow_options(),
            max_cached_workflows=settings.max_cached_workflows,
            max_concurrent_workflow_tasks=settings.max_workflow_tasks,
            graceful_shutdown_timeout=settings.drain_timeout,
        )
        try:
            await run_until(stop, worker)
        finally:
            archiving.cancel()
            await asyncio.wait({archiving})
    finally:
        await database.close()
