"""The command line as people run it, against a real Temporal server and scripted activities."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from temporalio.client import Client
from temporalio.service import RPCError

from contracts.error import MusterError
from contracts.name import AGENT_WORKFLOW
from muster.stack.namespace import check_namespace, prepare_namespace
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
