"""Real servers for all tests: one Temporal and one PostgreSQL per session, by the stack's own code.

A test that needs Temporal takes a task queue and a workflow id of its own; a test that needs
PostgreSQL gets a fresh, migrated database.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest
import pytest_asyncio
from temporalio.client import Client

from inference_service.model import ModelFiles, prepare_model
from muster.connection import connect_to
from muster.stack.namespace import prepare_namespace
from muster.stack.part import start_part
from muster.stack.port import free_port
from muster.stack.postgres import PostgresPart, choose_user
from muster.stack.temporal import TemporalPart
from store.database import Database
from store.migrate import upgrade

START_TIMEOUT_S = 60.0
TEMPLATE = "template_migrated"


@dataclass(frozen=True, slots=True)
class PostgresServer:
    """A running PostgreSQL whose database TEMPLATE has all migrations."""

    part: PostgresPart

    async def execute(self, statement: str) -> None:
        """Run one statement in the maintenance database."""
        connection = await asyncpg.connect(self.part.url("postgres"))
        try:
            await connection.execute(statement)
        finally:
            await connection.close()


KEPT = Path(__file__).parents[1] / ".muster"
"""Data directory, ignored by git, in which the model stays from one test run to the next."""


@pytest_asyncio.fixture(scope="session")
async def temporal_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TemporalPart]:
    """Return a running Temporal server with its state in memory."""
    part = TemporalPart(port=free_port(), ui_port=None, namespace="default", directory=None)
    log = tmp_path_factory.mktemp("temporal") / "temporal.log"
    child = await start_part(part, log, START_TIMEOUT_S)
    try:
        await prepare_namespace(await part.connect())
        yield part
    finally:
        await child.stop()


@pytest.fixture(scope="session")
def temporal_address(temporal_server: TemporalPart) -> str:
    """Return `host:port` of a Temporal server that knows our search attributes."""
    return temporal_server.address


@pytest_asyncio.fixture(scope="session")
async def temporal_client(temporal_address: str) -> Client:
    """Return a client as every process of ours has it."""
    return await connect_to(temporal_address, role="test")


@pytest_asyncio.fixture(scope="session")
async def postgres_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[PostgresServer]:
    """Return a running PostgreSQL server."""
    directory = tmp_path_factory.mktemp("postgres")
    part = PostgresPart(directory, directory / "postgres.log", choose_user(""))
    child = await start_part(part, part.log, START_TIMEOUT_S)
    server = PostgresServer(part)
    try:
        await server.execute(f"create database {TEMPLATE}")
        await upgrade(part.url(TEMPLATE))
        yield server
    finally:
        await child.stop()
        shutil.rmtree(part.socket_dir, ignore_errors=True)


@pytest_asyncio.fixture
async def database_url(postgres_server: PostgresServer) -> AsyncIterator[str]:
    """Return the URL of a fresh database with all migrations; it is dropped after the test."""
    name = f"test_{uuid4().hex[:16]}"
    await postgres_server.execute(f"create database {name} template {TEMPLATE}")
    yield postgres_server.part.url(name)
    await postgres_server.execute(f"drop database {name} with (force)")


@pytest_asyncio.fixture
async def empty_database_url(postgres_server: PostgresServer) -> AsyncIterator[str]:
    """Return the URL of a fresh database without any table."""
    name = f"test_{uuid4().hex[:16]}"
    await postgres_server.execute(f"create database {name}")
    yield postgres_server.part.url(name)
    await postgres_server.execute(f"drop database {name} with (force)")


@pytest_asyncio.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """Return a fresh, migrated database, open."""
    database = Database(database_url)
    yield database
    await database.close()


@pytest.fixture(scope="session")
def model_files() -> ModelFiles:
    """Return the small real model, as a checkpoint that vLLM and transformers load."""
    return prepare_model("smollm2", KEPT, lambda _line: None)
