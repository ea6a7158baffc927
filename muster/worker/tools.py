"""The tool worker: runs tool calls and opens jobs; users' tool modules are imported here only."""

from __future__ import annotations

import sys

from temporalio.worker import Worker

from activities.output import guarded_output
from activities.toolbox import Toolbox
from activities.worker import tool_activities
from contracts.error import BadInputError
from contracts.name import TOOLS_QUEUE
from muster.connection import connect
from muster.settings import Settings
from muster.stack.namespace import check_namespace
from muster.stack.state import locate
from muster.worker.lifecycle import run_until, stop_event
from store.database import Database


async def main(settings: Settings) -> None:
    """Run until SIGTERM. Raises BadInputError if namespace or database is not prepared."""
    stop = stop_event()
    # After the packages of ours and of the environment, so that a tool module never hides one.
    sys.path += [str(path) for path in settings.tool_path if str(path) not in sys.path]
    client = await connect(settings, role="tools")
    await check_namespace(client)
    database = Database(database_url(settings), pool_size=settings.database_pool_size)
    try:
        await database.check()
        async with Toolbox() as toolbox:
            worker = Worker(
                client,
                task_queue=TOOLS_QUEUE,
                activities=tool_activities(database, toolbox),
                max_concurrent_activities=settings.max_tool_calls,
                graceful_shutdown_timeout=settings.drain_timeout,
            )
            with guarded_output(toolbox.secrets.scrub):
                await run_until(stop, worker)
    finally:
        await database.close()


def database_url(settings: Settings) -> str:
    """Return the database's URL, or raise BadInputError if nothing names one."""
    if url := locate(settings).database_url:
        return url
    raise BadInputError(
        "no database is known", hint="start the stack with `muster up`, or set MUSTER_DATABASE_URL"
    )
