"""The command line as people run it, against a real Temporal server and scripted activities."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest
from temporalio.client import Client
from temporalio.service import RPCError

from contracts.error import MusterError
from contracts.name import AGENT_WORKFLOW
from muster.connection import connect_to
from muster.stack.namespace import check_namespace, prepare_namespace
from tests.cli.stage import DEADLINE_S, CommandLine, Stage


@pytest.fixture(scope="session")
async def cli_client(temporal_address: str) -> Client:
    """A client of a namespace that no other test uses."""
    client = await connect_to(temporal_address, f"cli-{uuid4().hex[:8]}", role="test")
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                await prepare_namespace(client)
                await check_namespace(client)
                await client.count_workflows(f"WorkflowType = '{AGENT_WORKFLOW}'")
                return client
            except (RPCError, MusterError):
                continue  # a new namespace is known to all parts of the server after a moment


@pytest.fixture
async def stage(cli_client: Client) -> AsyncIterator[Stage]:
    """The real agent worker, and the scripted rest."""
    async with Stage(cli_client) as stage:
        yield stage


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
