"""The command line as people run it, against a real Temporal server and scripted activities."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest
from temporalio.client import Client
from temporalio.service import RPCError
from temporalio.worker import Worker

from contracts.error import MusterError
from contracts.name import AGENT_WORKFLOW
from muster.stack.namespace import check_namespace, prepare_namespace
from store.database import Database
from tests.cli.past_stage import PastStage
from tests.cli.rolling import RollingWorkflow
from tests.cli.stage import DEADLINE_S, CommandLine, Stage
from tests.stack.new_namespace import new_namespace


@pytest.fixture(scope="session")
async def cli_client(temporal_address: str) -> Client:
    """A client of a namespace that no other test uses."""
    client = await new_namespace(temporal_address, "cli")
    await prepare_namespace(client)
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                await check_namespace(client)
                await client.count_workflows(f"WorkflowType = '{AGENT_WORKFLOW}'")
                return client
            except (RPCError, MusterError):
                await asyncio.sleep(0.1)  # new attributes are known to all after a moment


@pytest.fixture
async def stage(cli_client: Client) -> AsyncIterator[Stage]:
    """The real agent worker, and the scripted rest."""
    async with Stage(cli_client) as stage:
        yield stage


@pytest.fixture
async def past(cli_client: Client, database: Database) -> AsyncIterator[PastStage]:
    """The real agent worker, and a scripted rest that stores what it does in PostgreSQL."""
    past = PastStage(cli_client, database)
    async with past:
        yield past


@pytest.fixture
async def rolling(cli_client: Client) -> AsyncIterator[str]:
    """Return the task queue of jobs that continue as new after each LLM step."""
    queue = f"rolling-{uuid4().hex[:8]}"
    async with Worker(cli_client, task_queue=queue, workflows=[RollingWorkflow]):
        yield queue


@pytest.fixture
async def muster(
    temporal_address: str, cli_client: Client, tmp_path: Path
) -> AsyncIterator[CommandLine]:
    """Run `muster` in an empty directory, on the test's server and namespace."""
    line = CommandLine(
        tmp_path,
        {
            "MUSTER_TEMPORAL_ADDRESS": temporal_address,
            "MUSTER_TEMPORAL_NAMESPACE": cli_client.namespace,
            "MUSTER_DATA_DIR": str(tmp_path / "data"),
            "MUSTER_MODEL_NAME": "scripted",
        },
    )
    yield line
    await line.close()
