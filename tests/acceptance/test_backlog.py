"""Calls over a tool worker's limit wait on the server, where people see them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from temporalio.client import Client

from contracts.agent import AgentSpec, Sampling, ToolRef
from contracts.name import TOOLS_QUEUE
from muster.stack.queue import QUEUES, waiting_tasks
from store.database import Database
from tests.acceptance.calling import asks, calling, says
from tests.activities.conftest import GOOD
from tests.activities.good_tool import Gate, gate_named

DEADLINE_S = 30.0
LIMIT, CALLS = 2, 6


@pytest.fixture
def gate() -> Iterator[Gate]:
    with gate_named("pool") as found:
        yield found


async def test_sync_calls_over_the_pool_wait_on_the_task_queue_and_are_counted_there(
    temporal_client: Client, database: Database, gate: Gate
) -> None:
    """The pool is MUSTER_MAX_TOOL_CALLS; what it has no room for costs the worker nothing."""

    def model(number: int, _prompt: str) -> dict[str, Any]:
        wait = ("wait", {"gate": "pool"})
        return asks(*[wait] * CALLS) if number == 1 else says("Done.")

    spec = AgentSpec(
        name="waiter",
        instructions="Wait.",
        tools=(ToolRef(function=f"{GOOD}:wait"),),
        max_parallel_tool_calls=CALLS,
        sampling=Sampling(max_tokens=2_048),
    )
    queue, kind = QUEUES["tools"]
    assert queue == TOOLS_QUEUE
    async with (
        calling(temporal_client, database, model, max_tool_calls=LIMIT) as stage,
        asyncio.timeout(DEADLINE_S),
    ):
        handle = await stage.start(spec)
        while await waiting_tasks(temporal_client, queue, kind) < CALLS - LIMIT:
            pass  # each look is a call to the server
        rows = await stage.ledger(handle.id)
        assert [row.outcome for row in rows] == ["running"] * LIMIT
        gate.go_on.set()
        assert (await handle.result()).answer == "Done."
        assert len(await stage.ledger(handle.id)) == CALLS
