"""Bring a database's tables up to this code's; deployments run `python -m store.migrate`."""

from __future__ import annotations

import asyncio
import os

import sqlalchemy as sa
from alembic import command
from sqlalchemy.ext.asyncio import AsyncConnection

from contracts.error import MusterError
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


def main() -> None:
    """Upgrade the database that MUSTER_DATABASE_URL names."""
    url = os.environ.get("MUSTER_DATABASE_URL", "")
    if not url:
        raise SystemExit("error: MUSTER_DATABASE_URL is not set\nhint: set it to postgresql://…")
    try:
        asyncio.run(upgrade(url))
    except MusterError as error:
        raise SystemExit(f"error: {error.message}\nhint: {error.hint}") from error


if __name__ == "__main__":
    main()
