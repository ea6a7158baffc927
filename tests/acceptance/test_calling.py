"""Tool calls of whole jobs: attempts as configured, keys that hold, results that are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import CancelledError

from activities import call_tool
from contracts.agent import AgentSpec, OnFailure, RetryPolicy, ToolRef
from contracts.tool import CallToolResult
from muster.job import Jobs
from store.database import Database
from tests.acceptance.calling import asks, calling, says
from tests.activities.conftest import BAD, GOOD, HttpServer, http_server
from tests.activities.good_tool import Gate, gate_named
from tests.workflows.stage import reset
from workflows import option

__all__ = ["http_server"]

DEADLINE_S = 30.0


def tool(function: str, *, module: str = GOOD, attempts: int = 3, **policy: Any) -> ToolRef:
    retry = RetryPolicy(max_attempts=attempts, initial_interval=timedelta(milliseconds=50))
    return ToolRef(function=f"{module}:{function}", retry=retry, **policy)


def agent(*tools: ToolRef) -> AgentSpec:
    return AgentSpec(name="caller", instructions="Call.", tools=tools, max_parallel_tool_calls=4)


DOWN, NOT_FOUND, REFUSED = (
    "503 Service Unavailable\n\n",
    "404 Not Found\n\nno such customer",
    "401 Unauthorized\n\n",
)


@pytest.mark.parametrize(
    ("answers", "attempts", "made", "told"),
    [
        pytest.param([DOWN], 1, 1, "gave up after 1 attempts", id="transient-one-attempt"),
        pytest.param([DOWN], 4, 4, "gave up after 4 attempts", id="transient-four-attempts"),
        pytest.param([DOWN, DOWN, "200 OK\n\nfine"], 4, 3, "fine", id="transient-then-fine"),
        pytest.param([DOWN, NOT_FOUND], 4, 2, "no such customer", id="transient-then-no"),
        pytest.param([NOT_FOUND], 4, 1, "no such customer", id="the-models-fault"),
        pytest.param([REFUSED], 4, 1, "401 Unauthorized", id="permanent"),
    ],
)
async def test_a_server_sees_exactly_the_attempts_that_the_policy_allows(
    temporal_client: Client,
    database: Database,
    http_server: HttpServer,
    answers: Sequence[str],
    attempts: int,
    made: int,
    told: str,
) -> None:
    http_server.answers = answers
    read: list[str] = []

    def model(number: int, prompt: str) -> dict[str, Any]:
        if number == 1:
            return asks(("get", {"url": http_server.url}))
        read.append(prompt)
        return says("Done.")

    async with calling(temporal_client, database, model) as stage, asyncio.timeout(DEADLINE_S):
        handle = await stage.start(agent(tool("get", attempts=attempts)))
        await handle.result()
        rows = await stage.ledger(handle.id)
    assert http_server.requests == made
    assert len(rows) == made, "the ledger has a receipt of each"
    assert [row.outcome for row in rows[:-1]] == ["failed"] * (made - 1)
    assert told in read[0]


async def test_a_job_that_fails_with_its_tool_made_as_many_attempts(
    temporal_client: Client, database: Database, http_server: HttpServer
) -> None:
    http_server.answers = [DOWN]
    get = tool("get", attempts=2, on_failure=OnFailure.FAIL_JOB)
    async with (
        calling(
            temporal_client, database, lambda *_: asks(("get", {"url": http_server.url}))
        ) as stage,
        asyncio.timeout(DEADLINE_S),
    ):
        handle = await stage.start(agent(get))
        with pytest.raises(WorkflowFailureError):
            await handle.result()
    assert http_server.requests == 2


async def test_a_reset_job_makes_later_calls_under_new_keys_and_keeps_what_it_had(
    temporal_client: Client, database: Database
) -> None:
    """`pay` says its key: the turn before the reset keeps it, the turn after has another."""

    def model(number: int, prompt: str) -> dict[str, Any]:
        if number <= 2:
            return asks(("pay", {"amount": number}))
        keys = [word for word in prompt.split('"') if word.startswith("job-")]
        return says(" ".join(dict.fromkeys(keys)))

    async with calling(temporal_client, database, model) as stage, asyncio.timeout(DEADLINE_S):
        handle = await stage.start(agent(tool("pay")))
        first = str((await handle.result()).answer).split()
        # Tasks: open the job, step 1, call 1, step 2 …: the last one kept schedules step 2.
        again = await reset(temporal_client, handle, after_task=3)
        second = str((await again.result()).answer).split()
        rows = await stage.ledger(handle.id)
    assert len(first) == len(second) == 2
    assert first[0] == second[0], "a call that had finished keeps its key and its result"
    assert first[1] != second[1], "a call that is made again by a fork is another call"
    assert [row.outcome for row in rows] == ["finished"] * 3
    assert {row.call_id for row in rows} == {*first, *second}


async def test_a_reset_to_the_middle_of_a_turn_answers_its_finished_call_from_the_ledger(
    temporal_client: Client, database: Database, http_server: HttpServer
) -> None:
    http_server.answers = ["200 OK\n\nfirst", "200 OK\n\nsecond"]

    def model(number: int, prompt: str) -> dict[str, Any]:
        if number == 1:
            return asks(("get", {"url": http_server.url}))
        return says("first" if "first" in prompt else "second")

    async with calling(temporal_client, database, model) as stage, asyncio.timeout(DEADLINE_S):
        handle = await stage.start(agent(tool("get")))
        assert (await handle.result()).answer == "first"
        again = await reset(temporal_client, handle, after_task=2)  # it schedules the call
        assert (await again.result()).answer == "first"
    assert http_server.requests == 1


@pytest.fixture
def gate() -> Iterator[Gate]:
    with gate_named("slow") as found:
        yield found


async def test_results_that_a_cancelled_job_had_are_kept(
    temporal_client: Client, database: Database, gate: Gate
) -> None:
    """Two of three parallel calls have ended: history, ledger and report have their results."""
    asked = asks(
        ("shout", {"text": "hi"}), ("pay", {"amount": 7}), ("wait_async", {"gate": "slow"})
    )
    async with (
        calling(temporal_client, database, lambda *_: asked) as stage,
        asyncio.timeout(DEADLINE_S),
    ):
        handle = await stage.start(agent(tool("shout"), tool("pay"), tool("wait_async")))
        while [row.outcome for row in await stage.ledger(handle.id)].count("finished") < 2:
            pass  # each look is a query
        assert await asyncio.to_thread(gate.started.wait, DEADLINE_S)
        await handle.cancel()
        with pytest.raises(WorkflowFailureError) as caught:
            await handle.result()
        assert isinstance(caught.value.cause, CancelledError)
        rows = await stage.ledger(handle.id)
        (turn,) = (await Jobs(temporal_client).report(handle.id)).rows
    assert gate.cancelled.is_set()
    assert [(row.tool, row.outcome) for row in rows] == [
        ("shout", "finished"),
        ("pay", "finished"),
        ("wait_async", "cancelled"),
    ]
    kept = [CallToolResult.model_validate_json(row.result).content for row in rows[:2]]
    assert kept[0] == "HI" and kept[1].startswith('{"amount":7')
    assert [call.content for call in turn.tools] == [*kept, None], "history has them"
    assert [call.state for call in turn.tools] == ["completed", "completed", "cancelled"]


async def test_a_tool_that_blocks_its_loop_holds_up_no_other_kind_of_call(
    temporal_client: Client, database: Database, gate: Gate
) -> None:
    """The workers of this test share a loop: nothing here would move if the tool held it."""
    asked = asks(("blocks", {"gate": "slow"}), ("pay", {"amount": 7}))
    async with (
        calling(
            temporal_client, database, lambda n, _: asked if n == 1 else says("Done.")
        ) as stage,
        asyncio.timeout(DEADLINE_S),
    ):
        handle = await stage.start(agent(tool("blocks"), tool("pay")))
        assert await asyncio.to_thread(gate.started.wait, DEADLINE_S)
        while "finished" not in {row.outcome for row in await stage.ledger(handle.id)}:
            pass  # each look is a query
        gate.go_on.set()
        assert (await handle.result()).answer == "Done."
        rows = await stage.ledger(handle.id)
    assert [row.outcome for row in rows] == ["finished", "finished"], "one attempt each"


async def test_a_tool_that_blocks_holds_up_no_calls_heartbeats(
    temporal_client: Client, database: Database, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that is silent for three seconds would be made again: each is made once."""
    monkeypatch.setattr(option, "HEARTBEAT_TIMEOUT", timedelta(seconds=3))
    monkeypatch.setattr(call_tool, "HEARTBEAT_INTERVAL_S", 0.2)
    names = ("blocks", "wait")
    asked = asks(*((name, {"gate": "slow"}) for name in names))
    beats: dict[str, set[int]] = {}
    async with (
        calling(
            temporal_client, database, lambda n, _: asked if n == 1 else says("Done.")
        ) as stage,
        asyncio.timeout(DEADLINE_S),
    ):
        handle = await stage.start(agent(*map(tool, names)))
        while len(beats) < len(names) or min(map(len, beats.values())) < 3:
            for call in (await handle.describe()).raw_description.pending_activities:
                if call.HasField("last_heartbeat_time"):
                    at_ns = call.last_heartbeat_time.ToNanoseconds()
                    beats.setdefault(call.activity_id, set()).add(at_ns)
        gate.go_on.set()
        assert (await handle.result()).answer == "Done."
        rows = await stage.ledger(handle.id)
    assert [row.outcome for row in rows] == ["finished"] * 2, "one attempt each"


async def test_a_result_of_four_megabytes_over_its_limit_is_one_clear_error(
    call_told: Any,
) -> None:
    """Case J2: the error names tool, size and limit; test_large holds the other half."""
    prompt, rows = await call_told(tool("returns_large", module=BAD), {"n": 4_000_000})
    assert "the result of tool 'returns_large' has 4,000,000 bytes" in prompt
    assert "the limit is 256,000 bytes" in prompt
    assert len(rows) == 1


@pytest.fixture
def call_told(temporal_client: Client, database: Database) -> Any:
    """Return a function that makes one call: what the model reads then, and the ledger's rows."""

    async def call(ref: ToolRef, arguments: dict[str, Any]) -> tuple[str, Sequence[Any]]:
        read: list[str] = []

        def model(number: int, prompt: str) -> dict[str, Any]:
            read.append(prompt)
            return asks((ref.tool_name, arguments)) if number == 1 else says("Done.")

        async with calling(temporal_client, database, model) as stage, asyncio.timeout(DEADLINE_S):
            handle = await stage.start(agent(ref))
            assert (await handle.result()).answer == "Done."
            return read[1], await stage.ledger(handle.id)

    return call
