"""Stages for workflow tests: on the session's Temporal server, and on one that skips time."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.testing import WorkflowEnvironment

from contracts.name import SEARCH_STATE
from tests.workflows.stage import Stage

PROGRAMS = Path(sys.executable).parent


@pytest.fixture
async def stage(temporal_client: Client) -> AsyncIterator[Stage]:
    """Workers on the real server; every history of the test must replay."""
    async with Stage(temporal_client) as stage:
        yield stage


@pytest.fixture(scope="session")
async def skipping_client() -> AsyncIterator[Client]:
    """A client of the server that skips time while a result is awaited.

    It skips only while no activity is scheduled or runs: waits for retries and timers.
    """
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
