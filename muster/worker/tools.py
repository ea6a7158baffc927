"""The tool worker: runs tool calls and opens jobs; users' tool modules are imported here only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from temporalio.client import Client
from temporalio.worker import Worker

from activities.output import guarded_output
from activities.toolbox import Toolbox
from activities.worker import tool_activities
from contracts.name import tool_queue
from muster import telemetry
from muster.connection import connect
from muster.database_url import database_url
from muster.settings import Settings
from muster.stack.namespace import check_namespace
from muster.tool_group import ToolGroup
from muster.worker.lifecycle import run_until, stop_event
from store.database import Database


async def main(settings: Settings) -> None:
    """Run until SIGTERM. Raises BadInputError if namespace or database is not prepared."""
    stop = stop_event()
    telemetry.export_metrics("tools")
    # After the packages of ours and of the environment, so that a tool module never hides one.
    sys.path += [str(path) for path in settings.tool_path if str(path) not in sys.path]
    client = await connect(settings, role="tools")
    await check_namespace(client)
    database = Database(database_url(settings), pool_size=settings.database_pool_size)
    try:
        await database.check()
        async with Toolbox() as toolbox:
            workers = tool_workers(client, settings, tool_activities(database, toolbox))
            with guarded_output(toolbox.secrets.scrub):
                await run_until(stop, *workers)
    finally:
        await database.close()


def tool_workers(
    client: Client, settings: Settings, activities: Sequence[Callable[..., Any]]
) -> list[Worker]:
    """Return the worker of the tools without a group, then one for each group.

    All run the same activities. A group's rate is told to the server, which keeps to it over all
    workers; where their settings differ, the last that polled is right.
    """
    groups = [(None, ToolGroup()), *settings.tool_groups.items()]
    return [
        Worker(
            client,
            task_queue=tool_queue(name),
            activities=activities,
            max_concurrent_activities=group.at_once or settings.max_tool_calls,
            max_task_queue_activities_per_second=group.rate_per_s,
            graceful_shutdown_timeout=settings.drain_timeout,
        )
        for name, group in groups
    ]
