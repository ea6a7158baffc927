"""Alembic's entry: on the connection that the caller hands in, else on MUSTER_DATABASE_URL."""

from __future__ import annotations

import asyncio
import os

import sqlalchemy as sa
from alembic import context
from sqlalchemy.ext.asyncio import create_async_engine

from store.database import parse_url
from store.schema import metadata


def _migrate(connection: sa.Connection) -> None:
    context.configure(connection=connection, target_metadata=metadata, compare_server_default=True)
    with context.begin_transaction():
        context.run_migrations()


async def _migrate_by_url(url: str) -> None:
    engine = create_async_engine(parse_url(url))
    async with engine.begin() as connection:
        await connection.run_sync(_migrate)
    await engine.dispose()


if context.is_offline_mode():
    raise SystemExit("offline mode is not supported: set MUSTER_DATABASE_URL and run online")

if (handed_in := context.config.attributes.get("connection")) is not None:
    _migrate(handed_in)
elif url := os.environ.get("MUSTER_DATABASE_URL"):
    asyncio.run(_migrate_by_url(url))
else:
    raise SystemExit("set MUSTER_DATABASE_URL to the database to migrate")
