"""Bring a database's tables up to this code's."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import command
from sqlalchemy.ext.asyncio import AsyncConnection

from store.database import Database
from store.revision import alembic_config

_LOCK = 0x6D75_7374_6572
"""One migration at a time on one server ("muster" in ASCII)."""


async def upgrade(url: str, revision: str = "head") -> None:
    """Run all missing migrations in one transaction; idempotent and safe to run twice at once.

    Raises UnavailableError when the server does not answer, BadInputError when it refuses us.
    """
    database = Database(url, pool_size=1)

    async def work(connection: AsyncConnection) -> None:
        await connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
        await connection.run_sync(lambda sync: command.upgrade(alembic_config(sync), revision))

    try:
        await database.transact(work)
    finally:
        await database.close()
