"""A long job continues as new, and nothing shows: not its result, its counts, nor its messages."""

from __future__ import annotations

import asyncio
from collections import Counter
from uuid import uuid4

import pytest
from pydantic import JsonValue
from temporalio.client import (
    Client,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHistory,
    WorkflowUpdateFailedError,
)
from temporalio.common import SearchAttributeKey
from temporalio.exceptions import ApplicationError, CancelledError

from contracts.job import JobMessage, JobStatus, StopReason
from contracts.limit import MAX_MESSAGE_BYTES
from contracts.llm_step import LLMStepInput, LLMStepResult
from contracts.message import Role
from contracts.name import CALL_TOOL, LLM_STEP, MESSAGE_UPDATE, SEARCH_STATE
from contracts.tool import CallToolInput, CallToolResult
from muster.job import Jobs
from muster.job_message import new_message
from tests.workflows.peer import Gate, answered, calls, returns, says
from tests.workflows.stage import JobHandle, Stage, agent, limits, tool, within

SEARCH = calls(("search", {}))
SHOP = {"search": returns("3 left")}
TURNS = 20


def patient(**more: float) -> object:
    """Limits of a job that takes many turns."""
    return limits(**{"max_turns": 1_000, "max_tool_calls": 10_000, "max_tokens": 10**9, **more})


async def test_job_that_rolls_over_ends_as_one_that_does_not(
    rolling_stage: Stage, stage: Stage
) -> None:
    spec = agent(tool("search", max_calls=TURNS), answer_after=["search"], limits=patient())
    replies = [*[SEARCH] * TURNS, says("Done.")]
    handle, script = await rolling_stage.start(spec, *replies, tools=SHOP)
    result = await within(handle.result())
    alone, alone_script = await stage.run(spec, *replies, tools=SHOP)
    assert result == alone
    assert len(await rolling_stage.histories(handle)) >= 3
    assert script.openings == 1
    assert [[m.content for m in step.append] for step in script.steps] == [
        [m.content for m in step.append] for step in alone_script.steps
    ]
    numbers = [int(step.step_id.rpartition("/")[2]) for step in script.steps]
    assert numbers == list(range(1, TURNS + 2))
    assert [step.hints.attained_s for step in script.steps] == [
        step.hints.attained_s for step in alone_script.steps
    ]


async def test_report_covers_all_runs_of_a_job(rolling_stage: Stage) -> None:
    spec = agent(tool("search"), limits=patient())
    handle, _ = await rolling_stage.start(spec, *[SEARCH] * TURNS, says("Done."), tools=SHOP)
    result = await within(handle.result())
    report = await Jobs(rolling_stage.client).report(handle.id)
    assert report.status is JobStatus.COMPLETED
    assert report.agent == "clerk"
    assert report.usage == result.usage
    assert [row.turn for row in report.rows] == list(range(1, TURNS + 2))
    assert all(len(row.tools) == 1 for row in report.rows[:-1])
    described = await handle.describe()
    state = SearchAttributeKey.for_keyword(SEARCH_STATE)
    assert described.typed_search_attributes.get(state) == "completed"


async def test_limits_count_over_all_runs(rolling_stage: Stage) -> None:
    for policy, stop in (
        ({"max_turns": 18}, StopReason.MAX_TURNS),
        ({"max_tool_calls": 17}, StopReason.MAX_TOOL_CALLS),
        ({"max_tokens": 70 * 16}, StopReason.MAX_TOKENS),
    ):
        spec = agent(tool("search"), limits=patient(**policy, last_answer_tokens=0))
        handle, _ = await rolling_stage.start(spec, *[SEARCH] * 30, tools=SHOP)
        result = await within(handle.result())
        assert result.stop_reason is stop
        assert result.turns in (16, 18)
        assert len(await rolling_stage.histories(handle)) >= 2


@pytest.mark.slow
async def test_roll_over_in_the_middle_of_a_turn_makes_the_rest_of_its_calls(
    rolling_stage: Stage,
) -> None:
    """A call whose worker is lost when the roll-over is due is left to the next run."""
    lost: Counter[str] = Counter()

    async def fragile(call: CallToolInput) -> CallToolResult:
        """In both attempts of the first time, fall silent until the heartbeat timeout."""
        number = int(call.call.arguments["n"])  # type: ignore[arg-type]
        if number % 3 == 0 and lost[call.call.id] < 2:
            lost[call.call.id] += 1
            await asyncio.sleep(120)
        return answered(call, f"{number} left")

    asked: list[tuple[str, dict[str, JsonValue]]] = [("search", {"n": n}) for n in range(6)]
    one, many = calls(("search", {"n": 7})), calls(*asked)
    spec = agent(
        tool("search", retry={"max_attempts": 2}), max_parallel_tool_calls=6, limits=patient()
    )
    handle, script = await rolling_stage.start(
        spec, one, many, says("Done."), tools={"search": fragile}
    )
    result = await asyncio.wait_for(handle.result(), 150)
    assert (result.answer, result.tool_calls) == ("Done.", 7)
    assert [m.content for m in script.steps[2].append] == [f"{n} left" for n in range(6)]
    last, first = await rolling_stage.histories(handle)
    assert names_of(first)[-1] == names_of(last)[0] == CALL_TOOL
    assert LLM_STEP in names_of(last)


def names_of(history: WorkflowHistory) -> list[str]:
    """Return the names of the activities that a run scheduled, in order."""
    return [
        event.activity_task_scheduled_event_attributes.activity_type.name
        for event in history.events
        if event.HasField("activity_task_scheduled_event_attributes")
    ]


async def say(handle: JobHandle, text: str, message_id: str | None = None) -> None:
    """Send a message to the workflow itself, which tells apart what Temporal does not."""
    message = JobMessage(id=message_id or uuid4().hex, text=text)
    await handle.execute_update(MESSAGE_UPDATE, message, id=uuid4().hex)


async def test_message_is_read_at_the_next_turn_after_the_tools_answers(stage: Stage) -> None:
    gate = Gate()
    tools = {"search": gate.tool(returns("3 left"))}
    handle, script = await stage.start(agent(tool("search")), SEARCH, says("Ok."), tools=tools)
    await within(gate.reached.wait())
    await say(handle, "Red ones.", "a")
    await say(handle, "Red ones.", "a")
    await say(handle, "Small ones.", "b")
    gate.opened.set()
    await within(handle.result())
    assert [(m.role, m.content) for m in script.steps[1].append] == [
        (Role.TOOL, "3 left"),
        (Role.USER, "Red ones."),
        (Role.USER, "Small ones."),
    ]


async def test_answer_does_not_end_a_job_that_has_a_message_to_read(stage: Stage) -> None:
    gate = Gate()
    handle, script = await stage.start(agent(), gate.step(says("Two apples.")), says("Pears."))
    await within(gate.reached.wait())
    await say(handle, "Pears, rather.")
    gate.opened.set()
    result = await within(handle.result())
    assert (result.answer, result.turns) == ("Pears.", 2)
    assert [m.content for m in script.steps[1].append] == ["Pears, rather."]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (" \n", "the message is empty"),
        ("x" * MAX_MESSAGE_BYTES, "message has 64,002 bytes, the limit is 64,000 bytes"),
    ],
)
async def test_message_that_cannot_be_read_is_refused(stage: Stage, text: str, error: str) -> None:
    gate = Gate()
    handle, script = await stage.start(agent(), gate.step(says("Done.")))
    await within(gate.reached.wait())
    with pytest.raises(WorkflowUpdateFailedError) as caught:
        await say(handle, text)
    assert isinstance(caught.value.cause, ApplicationError)
    assert caught.value.cause.message == error
    gate.opened.set()
    await within(handle.result())
    assert len(script.steps) == 1


async def test_full_inbox_refuses_until_the_next_turn(stage: Stage) -> None:
    gate = Gate()
    tools = {"search": gate.tool(returns("3 left"))}
    handle, _ = await stage.start(agent(tool("search")), SEARCH, says("Ok."), tools=tools)
    await within(gate.reached.wait())
    for _ in range(2):
        await say(handle, "x" * (MAX_MESSAGE_BYTES - 10))
    with pytest.raises(WorkflowUpdateFailedError) as caught:
        await say(handle, "one more" * 100)
    assert isinstance(caught.value.cause, ApplicationError)
    assert "inbox" in caught.value.cause.message
    gate.opened.set()
    await within(handle.result())


async def test_message_to_a_job_that_gives_its_last_answer_is_refused(stage: Stage) -> None:
    gate = Gate()
    spec = agent(tool("search"), limits=limits(max_turns=1))
    handle, _ = await stage.start(spec, SEARCH, gate.step(says("So far.")), tools=SHOP)
    await within(gate.reached.wait())
    with pytest.raises(WorkflowUpdateFailedError) as caught:
        await say(handle, "One more thing.")
    assert isinstance(caught.value.cause, ApplicationError)
    assert caught.value.cause.message == "the job is ending: it reads no message any more"
    gate.opened.set()
    assert (await within(handle.result())).answer == "So far."


async def test_messages_sent_while_a_job_rolls_over_arrive_once_and_in_order(
    rolling_stage: Stage,
) -> None:
    """Case J11: three senders, each waiting for its receipts, across several roll-overs."""
    stop = asyncio.Event()
    enough = asyncio.Event()

    async def busy(call: CallToolInput) -> CallToolResult:
        return answered(call, "3 left")

    async def goes_on(step: LLMStepInput) -> LLMStepResult:
        return await (says("Done.") if stop.is_set() else SEARCH)(step)

    spec = agent(tool("search"), limits=patient())
    handle, script = await rolling_stage.start(
        spec,
        *[goes_on] * 900,
        tools={"search": busy},
    )
    jobs, acknowledged = Jobs(rolling_stage.client), list[str]()

    async def sender(name: int) -> None:
        number = 0
        while not enough.is_set():
            text = f"{name}:{number}"
            await jobs.send(handle.id, new_message(text, None))
            acknowledged.append(text)
            number += 1

    senders = [asyncio.create_task(sender(name)) for name in range(3)]
    async with asyncio.timeout(60):
        while len(await rolling_stage.histories(handle)) < 4:
            await asyncio.sleep(0.05)
    enough.set()
    await asyncio.gather(*senders)
    stop.set()
    await within(handle.result())
    read = [m.content for s in script.steps for m in s.append if ":" in m.content]
    assert sorted(read) == sorted(acknowledged), "each once"
    for name in range(3):
        own = [text for text in read if text.startswith(f"{name}:")]
        assert own == [f"{name}:{number}" for number in range(len(own))], "in order"
    assert len(read) > 10


async def test_cancellation_is_not_lost_in_a_roll_over(rolling_stage: Stage) -> None:
    """Asked for at any moment of a job that rolls over every few turns."""
    spec = agent(tool("search"), limits=patient())
    for delay_s in (0.05, 0.2, 0.35, 0.5, 0.65):
        handle, _ = await rolling_stage.start(spec, *[SEARCH] * 900, tools=SHOP)
        await asyncio.sleep(delay_s)
        await handle.cancel()
        with pytest.raises(WorkflowFailureError) as caught:
            await within(handle.result())
        assert isinstance(caught.value.cause, CancelledError)
        assert (await handle.describe()).status is WorkflowExecutionStatus.CANCELED


async def test_job_that_rolls_over_hands_on_a_preview_of_its_input_only(
    rolling_client: Client,
) -> None:
    async with Stage(rolling_client) as stage:
        spec = agent(tool("search"), limits=patient())
        handle, _ = await stage.start(spec, *[SEARCH] * TURNS, says("Done."), tools=SHOP)
        await within(handle.result())
        last, *_, first = await stage.histories(handle)
        given = last.events[0].workflow_execution_started_event_attributes.input.payloads[0].data
        whole = first.events[0].workflow_execution_started_event_attributes.input.payloads[0].data
        assert b"carried" in given
        assert len(given) < len(whole) + 2_000


async def test_job_whose_next_run_begins_with_nearly_a_whole_payload_rolls_over(
    rolling_stage: Stage,
) -> None:
    """A large agent, the answers of 32 calls that stand in history whole, a full inbox."""
    gate, answer = Gate(), "x" * 43_000
    spec = agent(tool("search"), max_parallel_tool_calls=32, limits=patient()).model_copy(
        update={"instructions": "x" * 380_000}
    )
    asked: list[tuple[str, dict[str, JsonValue]]] = [("search", {"n": n}) for n in range(32)]
    handle, script = await rolling_stage.start(
        spec,
        calls(*asked),
        says("Done, before the messages."),
        says("Done."),
        tools={"search": gate.tool(returns(answer))},
    )
    await within(gate.reached.wait())
    for _ in range(2):
        await say(handle, "y" * (MAX_MESSAGE_BYTES - 10))
    gate.opened.set()
    assert (await within(handle.result())).answer == "Done."
    last, *_ = await rolling_stage.histories(handle)
    begun = last.events[0].workflow_execution_started_event_attributes
    assert begun.continued_execution_run_id
    assert (await Jobs(rolling_stage.client).report(handle.id)).unread == ()
    assert len(begun.input.payloads[0].data) > 1_800_000
    contents = [m.content for m in script.steps[1].append]
    assert contents[:32] == [answer] * 32
