"""Stages for workflow tests: on the session's Temporal server, and on one that skips time."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.testing import WorkflowEnvironment

from contracts.name import SEARCH_STATE
from muster.connection import connect_to
from muster.stack.namespace import prepare_namespace
from muster.stack.part import start_part
from muster.stack.port import free_port
from muster.stack.process import Command
from muster.stack.temporal import TemporalPart
from tests.workflows.stage import Stage

PROGRAMS = Path(sys.executable).parent


@pytest.fixture
async def stage(temporal_client: Client) -> AsyncIterator[Stage]:
    """Workers on the real server; every history of the test must replay."""
    async with Stage(temporal_client) as stage:
        yield stage


ROLL_OVER_EVENTS = 40
"""Length of a history at which the server of `rolling_stage` suggests to continue as new."""


class RollingTemporal(TemporalPart):
    """A server that suggests to continue as new after few events."""

    def command(self) -> Command:
        """Return how to start it."""
        command = super().command()
        key = "limit.historyCount.suggestContinueAsNew"
        given = ["--dynamic-config-value", f"{key}={ROLL_OVER_EVENTS}"]
        return replace(command, argv=[*command.argv, *given])


@pytest.fixture(scope="session")
async def rolling_client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    """A client of a server on which jobs roll over after a few turns."""
    part = RollingTemporal(port=free_port(), ui_port=None, namespace="default", directory=None)
    child = await start_part(part, tmp_path_factory.mktemp("rolling") / "temporal.log", 60.0)
    try:
        await prepare_namespace(await part.connect())
        yield await connect_to(part.address, role="test")
    finally:
        await child.stop()


@pytest.fixture
async def rolling_stage(rolling_client: Client) -> AsyncIterator[Stage]:
    """Workers on that server; every history of the test, of each run, must replay."""
    async with Stage(rolling_client) as stage:
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
