"""The client of jobs as the commands have it: with the database behind it where one is known."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from muster.connection import connect
from muster.job import Jobs
from muster.settings import Settings
from muster.stack.state import locate

PATIENCE = timedelta(seconds=1)
"""How long a command waits for a database that does not answer: a person waits for the command."""


@asynccontextmanager
async def open_jobs(settings: Settings) -> AsyncIterator[Jobs]:
    """Connect to Temporal; the database, which few commands need, is not asked before it is.

    Raises UnavailableError if Temporal does not answer.
    """
    client = await connect(settings)
    url = locate(settings).database_url
    if not url:
        yield Jobs(client)
        return
    # Here, since few commands need it: SQLAlchemy takes long to load.
    from muster.past import Past
    from store.database import Database

    database = Database(url, pool_size=1, patience=PATIENCE)
    try:
        yield Jobs(client, Past(database))
    finally:
        await database.close()
