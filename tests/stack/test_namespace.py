"""What Muster needs of a namespace is made once, checked by workers, and never fought over."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client

from contracts.error import BadInputError, UnavailableError
from contracts.name import SEARCH_STATE
from muster.connection import connect_to
from muster.stack.namespace import RETENTION, check_namespace, prepare_namespace
from muster.stack.port import free_port
from tests.stack.command_line import CommandLine
from tests.stack.new_namespace import new_namespace


@pytest_asyncio.fixture
async def fresh(temporal_address: str) -> Client:
    """Return a client of a new namespace that nobody has prepared."""
    return await new_namespace(temporal_address, "fresh")


async def test_namespace_is_prepared_once_and_for_all(fresh: Client) -> None:
    for _ in range(2):
        await prepare_namespace(fresh)
    await check_namespace(fresh)
    found = await fresh.workflow_service.describe_namespace(
        DescribeNamespaceRequest(namespace=fresh.namespace)
    )
    assert found.config.workflow_execution_retention_ttl.ToTimedelta() == RETENTION


async def test_namespace_that_does_not_exist_is_named(temporal_address: str) -> None:
    client = await connect_to(temporal_address, "missing")
    with pytest.raises(BadInputError, match="'missing' does not exist"):
        await check_namespace(client)


async def test_attribute_of_another_type_is_named(fresh: Client) -> None:
    await fresh.operator_service.add_search_attributes(
        AddSearchAttributesRequest(
            namespace=fresh.namespace,
            search_attributes={SEARCH_STATE: IndexedValueType.INDEXED_VALUE_TYPE_INT},
        )
    )
    with pytest.raises(BadInputError, match=f"{SEARCH_STATE!r} .* has type INDEXED_VALUE_TYPE_INT"):
        await prepare_namespace(fresh)


async def test_worker_refuses_a_namespace_that_lacks_our_attributes(
    fresh: Client, muster: CommandLine, temporal_address: str
) -> None:
    done = await asyncio.to_thread(
        muster.run,
        "worker",
        "agents",
        MUSTER_TEMPORAL_ADDRESS=temporal_address,
        MUSTER_TEMPORAL_NAMESPACE=fresh.namespace,
    )
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()[-2:]
    assert error.startswith(
        f"error: Temporal namespace '{fresh.namespace}' lacks the search attrib"
    )
    assert hint == "hint: muster up registers them"


async def test_server_that_does_not_answer_is_named_with_a_hint() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(
        UnavailableError, match=f"no Temporal server answers at {address}"
    ) as raised:
        await connect_to(address)
    assert "muster up" in raised.value.hint
