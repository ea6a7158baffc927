"""Tools that are activities of another worker: what it is handed, and what its answers come to.

The workers here use Temporal's SDK alone, with its own converter, as one in any language does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from temporalio import activity
from temporalio.api.common.v1 import Payload
from temporalio.client import Client, WorkflowFailureError
from temporalio.converter import DefaultPayloadConverter
from temporalio.exceptions import ApplicationError, CancelledError
from temporalio.worker import (
    ActivityInboundInterceptor,
    ExecuteActivityInput,
    Interceptor,
    Worker,
)

from contracts.agent import AgentSpec, OnFailure, RetryPolicy, ToolRef
from contracts.tool import ToolOutcome
from contracts.tool_source import RemoteActivity
from muster.job import Jobs
from muster.transcript import conversation_tail
from store.database import Database
from tests.acceptance.calling import Calling, asks, calling, says

DEADLINE_S = 30.0
HEADER = "idempotency-key"


@dataclass
class Seen:
    """What a worker of somebody else's was asked, attempt by attempt."""

    ids: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    arguments: list[Any] = field(default_factory=list)
    running: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)


class Watch(Interceptor):
    """Notes id, header and arguments of each attempt."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def intercept_activity(
        self,
        next: ActivityInboundInterceptor,  # noqa: A002 - the SDK's name
    ) -> ActivityInboundInterceptor:
        """Stand before the activity."""
        return _Watched(next, self.seen)


class _Watched(ActivityInboundInterceptor):
    def __init__(self, then: ActivityInboundInterceptor, seen: Seen) -> None:
        super().__init__(then)
        self._seen = seen

    async def execute_activity(
        self,
        input: ExecuteActivityInput,  # noqa: A002 - the SDK's name
    ) -> Any:
        header: Payload = input.headers[HEADER]
        [key] = DefaultPayloadConverter().from_payloads([header], [str])
        self._seen.keys.append(key)
        self._seen.ids.append(activity.info().activity_id)
        self._seen.arguments.append(input.args)
        return await super().execute_activity(input)


def foreign(seen: Seen) -> list[Callable[..., Any]]:
    """Return the activities of somebody else's worker."""

    @activity.defn
    async def say(_: dict[str, Any]) -> Any:
        return "two apples"

    @activity.defn
    async def count(_: dict[str, Any]) -> Any:
        return {"apples": 2, "note": "ünripe"}

    @activity.defn
    async def nothing(_: dict[str, Any]) -> Any:
        return None

    @activity.defn
    async def raw(_: dict[str, Any]) -> Any:
        return b"\x00\xff"

    @activity.defn
    async def huge(_: dict[str, Any]) -> Any:
        return "x" * 3_000_000

    @activity.defn
    async def large(order: dict[str, Any]) -> Any:
        return "y" * int(order["size"])

    @activity.defn
    async def flaky(_: dict[str, Any]) -> Any:
        if activity.info().attempt < 3:
            raise ApplicationError("the shelf is stuck", type="StuckError")
        return "done at last"

    @activity.defn
    async def stuck(_: dict[str, Any]) -> Any:
        raise ApplicationError("the shelf is stuck", type="StuckError")

    @activity.defn
    async def refuse(_: dict[str, Any]) -> Any:
        raise ApplicationError("we have no pears", type="NoSuchItem", non_retryable=True)

    @activity.defn
    async def crash(_: dict[str, Any]) -> Any:
        raise KeyError("apples")

    @activity.defn
    async def shout(order: dict[str, Any]) -> Any:
        loud = "!" * int(order["size"])
        raise ApplicationError(loud, loud[: int(order["hint"])], non_retryable=True)

    @activity.defn
    async def hang(_: dict[str, Any]) -> Any:
        seen.running.set()
        try:
            while True:
                activity.heartbeat()
                await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            seen.cancelled.set()
            raise

    return [say, count, nothing, raw, huge, large, flaky, stuck, refuse, crash, shout, hang]


@asynccontextmanager
async def foreign_worker(address: str, seen: Seen) -> AsyncIterator[str]:
    """Run such a worker; return the task queue it polls."""
    queue = f"theirs-{uuid4().hex[:8]}"
    worker = Worker(
        await Client.connect(address),
        task_queue=queue,
        activities=foreign(seen),
        interceptors=[Watch(seen)],
    )
    async with worker:
        yield queue


def agent(queue: str, kind: str, *, attempts: int = 3, **policy: Any) -> AgentSpec:
    heartbeat = policy.pop("heartbeat", None)
    remote = RemoteActivity(
        type=kind,
        queue=queue,
        description="Ask the warehouse.",
        arguments={"type": "object"},
        heartbeat=heartbeat,
    )
    retry = RetryPolicy(max_attempts=attempts, initial_interval=timedelta(milliseconds=50))
    tool = ToolRef(activity=remote, name="ask", retry=retry, **policy)
    return AgentSpec(name="caller", instructions="Call.", tools=(tool,), max_parallel_tool_calls=2)


def asking(read: list[str], **arguments: Any) -> Callable[[int, str], dict[str, Any]]:
    """Return a model that asks once, and keeps what it reads then."""

    def model(number: int, prompt: str) -> dict[str, Any]:
        if number == 1:
            return asks(("ask", arguments))
        read.append(prompt)
        return says("Done.")

    return model


@pytest.mark.parametrize(
    ("kind", "attempts", "made", "told"),
    [
        ("say", 3, 1, "two apples"),
        ("count", 3, 1, '{"apples":2,"note":"ünripe"}'),
        ("nothing", 3, 1, "null"),
        ("flaky", 3, 3, "done at last"),
        ("stuck", 3, 3, "error: the shelf is stuck (3 attempts)"),
        ("stuck", 1, 1, "error: the shelf is stuck"),
        ("refuse", 3, 1, "error: we have no pears"),
        ("crash", 2, 2, "error: 'apples' (2 attempts)"),
        ("raw", 3, 1, "error: its activity returned a payload of 'binary/plain', not JSON"),
        ("huge", 2, None, "size that exceeded the error limit. (2 attempts)"),
        ("unheard_of", 2, 0, "is not registered on this worker"),
    ],
)
async def test_what_an_activity_does_is_what_the_model_reads_after_as_many_attempts_as_configured(
    temporal_address: str,
    temporal_client: Client,
    database: Database,
    kind: str,
    attempts: int,
    made: int | None,
    told: str,
) -> None:
    read: list[str] = []
    seen = Seen()
    async with (
        foreign_worker(temporal_address, seen) as queue,
        calling(temporal_client, database, asking(read, item="apples")) as stage,
        asyncio.timeout(DEADLINE_S),
    ):
        handle = await stage.start(agent(queue, kind, attempts=attempts))
        assert (await handle.result()).answer == "Done."
        assert await stage.ledger(handle.id) == [], "nothing ran on a worker of ours"
        report = await Jobs(temporal_client).report(handle.id)
    assert told in read[0], read[0]
    if made is not None:
        assert len(seen.arguments) == made
    assert all(given == [{"item": "apples"}] for given in seen.arguments)
    assert seen.keys == seen.ids
    assert len(set(seen.keys)) <= 1, "all attempts at a call have one key"
    [row] = report.rows[0].tools
    assert (row.tool, row.arguments) == ("ask", {"item": "apples"})
    assert row.attempts == (attempts if kind == "unheard_of" else max(made or 1, row.attempts))
    assert not seen.keys or row.call_id == seen.keys[0]
    if not told.startswith("error") and made:
        assert row.outcome is ToolOutcome.OK
        assert row.content == (None if kind == "nothing" else told)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("stuck", "tool 'ask' failed: the shelf is stuck (2 attempts)"),
        ("refuse", "tool 'ask' failed: we have no pears"),
        ("raw", "tool 'ask' failed: its activity returned a payload of 'binary/plain', not JSON"),
        ("say", "tool 'ask' failed: its activity's result has 12 bytes, the limit is 5 bytes"),
    ],
)
async def test_a_failure_or_a_result_that_cannot_be_read_fails_the_job_if_the_agent_says_so(
    temporal_address: str, temporal_client: Client, database: Database, kind: str, said: str
) -> None:
    async with (
        foreign_worker(temporal_address, Seen()) as queue,
        calling(temporal_client, database, asking([])) as stage,
        asyncio.timeout(DEADLINE_S),
    ):
        policy = {"on_failure": OnFailure.FAIL_JOB, "max_result_bytes": 5}
        handle = await stage.start(agent(queue, kind, attempts=2, **policy))
        with pytest.raises(WorkflowFailureError) as failed:
            await handle.result()
    assert str(failed.value.cause) == f"ToolFailedError: {said}"


async def test_a_large_result_goes_to_the_store_and_the_model_reads_the_whole(
    temporal_address: str, temporal_client: Client, database: Database
) -> None:
    """Case J2, of an activity: what rolls over and what the next step is handed stays small."""
    read: list[str] = []
    async with (
        foreign_worker(temporal_address, Seen()) as queue,
        calling(temporal_client, database, asking(read, size=20_000)) as stage,
        asyncio.timeout(DEADLINE_S),
    ):
        handle = await stage.start(agent(queue, "large"))
        assert (await handle.result()).answer == "Done."
        history = await handle.fetch_history()
        report = await Jobs(temporal_client).report(handle.id)
    assert "y" * 20_000 in read[0]
    asked = [
        each.activity_task_scheduled_event_attributes
        for each in history.events
        if each.HasField("activity_task_scheduled_event_attributes")
    ]
    assert [each.activity_type.name for each in asked] == [
        "open_job", "llm_step", "large", "keep_result", "llm_step",
    ]  # fmt: skip
    assert asked[-1].input.ByteSize() < 10_000
    assert [len(row.tools) for row in report.rows] == [1, 0]
    shown = report.rows[0].tools[0].content
    assert shown == "y" * 500 + "…\n[of 20,000 characters; the history has the whole]"
    assert report.tool_calls == 1


async def test_a_cancelled_job_cancels_an_activity_that_heartbeats(
    temporal_address: str, temporal_client: Client, database: Database
) -> None:
    seen = Seen()
    async with (
        foreign_worker(temporal_address, seen) as queue,
        calling(temporal_client, database, asking([])) as stage,
        asyncio.timeout(DEADLINE_S),
    ):
        handle = await stage.start(agent(queue, "hang", heartbeat=timedelta(seconds=1)))
        await seen.running.wait()
        await handle.cancel()
        with pytest.raises(WorkflowFailureError) as failed:
            await handle.result()
        assert isinstance(failed.value.cause, CancelledError)
        await seen.cancelled.wait()
        [row] = (await Jobs(temporal_client).report(handle.id)).rows[0].tools
    assert (row.state, row.tool, row.attempts) == ("cancelled", "ask", 1)


async def test_an_activity_that_takes_too_long_is_cut_off_in_each_attempt(
    temporal_address: str, temporal_client: Client, database: Database
) -> None:
    read: list[str] = []
    seen = Seen()
    async with (
        foreign_worker(temporal_address, seen) as queue,
        calling(temporal_client, database, asking(read)) as stage,
        asyncio.timeout(DEADLINE_S),
    ):
        slow = agent(queue, "hang", attempts=2, timeout=timedelta(seconds=0.5))
        await (await stage.start(slow)).result()
    assert "error: it took longer than its timeout of 0.5 s (2 attempts)" in read[0]
    assert len(seen.keys) == 2 and len(set(seen.keys)) == 1


async def test_a_queue_that_nobody_polls_is_one_error_that_names_it(
    temporal_client: Client, database: Database
) -> None:
    read: list[str] = []
    async with (
        calling(temporal_client, database, asking(read)) as stage,
        asyncio.timeout(DEADLINE_S),
    ):
        await _ended(stage, agent("nowhere", "say", queue_timeout=timedelta(seconds=0.5)))
    said = "error: no worker took it from task queue 'nowhere' within its queue_timeout of 0.5 s"
    assert said in read[0]


async def test_an_open_turn_shows_what_an_activity_has_answered(
    temporal_address: str, temporal_client: Client, database: Database
) -> None:
    """The transcript of a job between the answer of an activity and the step that reads it."""
    async with (
        foreign_worker(temporal_address, Seen()) as queue,
        calling(temporal_client, database, asking([])) as stage,
        asyncio.timeout(DEADLINE_S),
    ):
        handle = await _ended(stage, agent(queue, "say"))
        events = list((await handle.fetch_history()).events)
    answered = [
        place
        for place, event in enumerate(events)
        if event.HasField("activity_task_completed_event_attributes")
    ]
    tail = conversation_tail([events[: answered[2] + 1]])
    [message] = tail.pending
    assert (message.content, message.tool) == ("two apples", "ask")
    assert tail.unanswered == []
    tail = conversation_tail([events[: answered[2]]])
    assert (list(tail.pending), [call.tool for call in tail.unanswered]) == ([], ["ask"])


async def _ended(stage: Calling, spec: AgentSpec) -> Any:
    handle = await stage.start(spec)
    assert (await handle.result()).answer == "Done."
    return handle


@pytest.mark.parametrize(("size", "hint"), [(900_000, 900_000), (1_900_000, 0), (0, 1_900_000)])
@pytest.mark.parametrize("on_failure", OnFailure)
async def test_a_huge_error_of_an_activity_ends_its_call_and_nothing_else(
    temporal_address: str,
    temporal_client: Client,
    database: Database,
    on_failure: OnFailure,
    size: int,
    hint: int,
) -> None:
    read: list[str] = []
    async with (
        foreign_worker(temporal_address, Seen()) as queue,
        calling(temporal_client, database, asking(read, size=size, hint=hint)) as stage,
        asyncio.timeout(DEADLINE_S),
    ):
        handle = await stage.start(agent(queue, "shout", on_failure=on_failure))
        if on_failure is OnFailure.TELL_MODEL:
            assert (await handle.result()).answer == "Done."
            assert len(read[0]) < 5_000
        else:
            with pytest.raises(WorkflowFailureError) as failed:
                await handle.result()
            assert len(str(failed.value.cause)) < 5_000
            report = await Jobs(temporal_client).report(handle.id)
            assert len(report.hint or "") < 5_000
