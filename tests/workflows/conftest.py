"""Real Temporal servers for workflow tests: the development server and the time-skipping one."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest
from temporalio.client import Client
from temporalio.common import SearchAttributeKey
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.testing import WorkflowEnvironment

from contracts.name import SEARCH_STATE
from tests.workflows.stage import Stage

PROGRAMS = Path(sys.executable).parent

SERVER_FLAGS = [
    flag
    for setting in (
        "history.transferProcessorMaxPollRPS=1000",
        "history.timerProcessorMaxPollRPS=1000",
        "frontend.WorkerCommandsEnabled=true",
        "system.enableCancelActivityWorkerCommand=true",
    )
    for flag in ("--dynamic-config-value", setting)
]


async def start_server() -> WorkflowEnvironment:
    """Start a development server."""
    return await WorkflowEnvironment.start_local(
        data_converter=pydantic_data_converter,
        dev_server_existing_path=str(PROGRAMS / "temporal"),
        dev_server_extra_args=SERVER_FLAGS,
        dev_server_log_level="error",
        search_attributes=[SearchAttributeKey.for_keyword(SEARCH_STATE)],
    )


@pytest.fixture(scope="session")
async def client() -> AsyncIterator[Client]:
    """A client of the development server."""
    async with await start_server() as environment:
        yield environment.client


@pytest.fixture
async def stage(client: Client) -> AsyncIterator[Stage]:
    """Workers on the development server; every history of the test must replay."""
    async with Stage(client) as stage:
        yield stage


@pytest.fixture(scope="session")
async def skipping_client() -> AsyncIterator[Client]:
    """A client of the server that skips time while a result is awaited."""
    environment = await WorkflowEnvironment.start_time_skipping(
        data_converter=pydantic_data_converter,
        test_server_existing_path=str(PROGRAMS / "temporal-test-server"),
    )
    async with environment:
        await environment.client.operator_service.add_search_attributes(
            AddSearchAttributesRequest(
                namespace=environment.client.namespace,
                search_attributes={SEARCH_STATE: IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD},
            )
        )
        yield environment.client


@pytest.fixture
async def skipping_stage(skipping_client: Client) -> AsyncIterator[Stage]:
    """Workers on the time-skipping server; every history of the test must replay."""
    async with Stage(skipping_client) as stage:
        yield stage
