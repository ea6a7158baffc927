"""Every limit of an agent ends its job with a reason, a last answer, and what it has used."""

from __future__ import annotations

import asyncio

import pytest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError
from temporalio.common import SearchAttributeKey
from temporalio.exceptions import ApplicationError, CancelledError

from contracts.job import JobMessage, StopReason
from contracts.llm_step import LLMStepInput, LLMStepResult
from contracts.message import Role
from contracts.name import MESSAGE_UPDATE, SEARCH_STATE
from contracts.tool import CallToolInput, CallToolResult
from muster.job import Jobs
from tests.workflows.peer import STEP_USAGE, Gate, calls, returns, says
from tests.workflows.stage import Stage, agent, limits, progress, tool, within

FOREVER = calls(("search", {}))
SHOP = {"search": returns("3 left")}


async def test_max_turns_stops_the_job_with_a_last_answer(stage: Stage) -> None:
    spec = agent(tool("search"), limits=limits(max_turns=3, last_answer_tokens=99))
    handle, script = await stage.start(spec, *[FOREVER] * 3, says("3 left, so far."), tools=SHOP)
    result = await within(handle.result())
    assert result.stop_reason is StopReason.MAX_TURNS
    assert result.answer == "3 left, so far."
    assert (result.turns, result.llm_steps, result.tool_calls) == (4, 4, 3)
    last = script.steps[-1]
    assert (last.output.tools, last.output.may_answer) == ((), True)
    assert last.sampling.max_tokens == 99
    assert [message.role for message in last.append] == [Role.TOOL, Role.USER]
    assert "max_turns" in last.append[-1].content
    described = await handle.describe()
    assert described.status is WorkflowExecutionStatus.COMPLETED
    state = SearchAttributeKey.for_keyword(SEARCH_STATE)
    assert described.typed_search_attributes.get(state) == "stopped"
    assert (await progress(handle)).doing == "stopped: max_turns reached"


@pytest.mark.parametrize(
    ("policy", "stop"),
    [
        ({"max_tokens": 150}, StopReason.MAX_TOKENS),
        ({"max_llm_steps": 3}, StopReason.MAX_LLM_STEPS),
        ({"max_engine_time": 2.0}, StopReason.MAX_ENGINE_TIME),
        ({"max_turns": 3}, StopReason.MAX_TURNS),
    ],
)
async def test_each_budget_stops_the_job_with_its_reason_and_a_last_answer(
    stage: Stage, policy: dict[str, float], stop: StopReason
) -> None:
    """Each step counts 70 uncached tokens and 0.75 s: the third turn is the last under each."""
    spec = agent(tool("search"), limits=limits(**policy))
    result, script = await stage.run(spec, *[FOREVER] * 3, says("So far."), tools=SHOP)
    assert (result.stop_reason, result.answer) == (stop, "So far.")
    assert len(script.steps) == result.llm_steps == 4
    assert result.usage.completion_tokens == 4 * STEP_USAGE.completion_tokens


async def test_agent_may_do_without_a_last_answer(stage: Stage) -> None:
    spec = agent(tool("search"), limits=limits(max_turns=2, last_answer_tokens=0))
    result, script = await stage.run(spec, *[FOREVER] * 2, tools=SHOP)
    assert (result.stop_reason, result.answer) == (StopReason.MAX_TURNS, None)
    assert len(script.steps) == 2


async def test_answer_that_is_held_back_is_no_last_answer_either(stage: Stage) -> None:
    spec = agent(tool("search"), tool("check"), answer_after=["check"], limits=limits(max_turns=2))
    result, script = await stage.run(spec, *[FOREVER] * 2, tools=SHOP)
    assert (result.stop_reason, result.answer) == (StopReason.MAX_TURNS, None)
    assert len(script.steps) == 2


async def test_last_answer_that_fails_leaves_the_reason_as_it_was(stage: Stage) -> None:
    async def broken(step: LLMStepInput) -> LLMStepResult:
        raise ApplicationError("the prompt is too long", non_retryable=True)

    spec = agent(tool("search"), limits=limits(max_turns=1))
    result, script = await stage.run(spec, FOREVER, broken, tools=SHOP)
    assert (result.stop_reason, result.answer) == (StopReason.MAX_TURNS, None)
    assert len(script.steps) == 2


@pytest.mark.parametrize("last_answer_tokens", [0, 99], ids=["no last answer", "it fails"])
async def test_messages_that_no_step_has_read_are_named_in_the_result(
    stage: Stage, last_answer_tokens: int
) -> None:
    async def broken(step: LLMStepInput) -> LLMStepResult:
        raise ApplicationError("the prompt is too long", non_retryable=True)

    gate = Gate()
    spec = agent(tool("search"), limits=limits(max_turns=1, last_answer_tokens=last_answer_tokens))
    handle, _ = await stage.start(
        spec, gate.step(FOREVER), broken, tools={"search": returns("3 left")}
    )
    await within(gate.reached.wait())
    for message_id in ("a", "b"):
        message = JobMessage(id=message_id, text="Red ones.")
        await handle.execute_update(MESSAGE_UPDATE, message, id=message_id)
    gate.opened.set()
    result = await within(handle.result())
    assert (result.stop_reason, result.answer) == (StopReason.MAX_TURNS, None)
    assert result.unread == ("a", "b")
    report = await Jobs(stage.client).report(handle.id)
    assert report.unread == ("a", "b")


async def test_messages_that_the_last_answer_reads_are_not_unread(stage: Stage) -> None:
    gate = Gate()
    spec = agent(tool("search"), limits=limits(max_turns=1))
    handle, script = await stage.start(spec, gate.step(FOREVER), says("Red."), tools=SHOP)
    await within(gate.reached.wait())
    message = JobMessage(id="a", text="Red ones.")
    await handle.execute_update(MESSAGE_UPDATE, message, id="a")
    gate.opened.set()
    result = await within(handle.result())
    assert (result.answer, result.unread) == ("Red.", ())
    assert "Red ones." in [each.content for each in script.steps[-1].append]


async def test_job_cancelled_during_its_last_answer_is_cancelled(stage: Stage) -> None:
    gate = Gate()
    spec = agent(tool("search"), limits=limits(max_turns=1))
    handle, _ = await stage.start(spec, FOREVER, gate.step(says("never")), tools=SHOP)
    await within(gate.reached.wait())
    await handle.cancel()
    with pytest.raises(WorkflowFailureError) as caught:
        await within(handle.result())
    assert isinstance(caught.value.cause, CancelledError)


async def test_answer_in_the_last_turn_is_an_answer(stage: Stage) -> None:
    spec = agent(tool("search"), limits=limits(max_turns=2))
    result, _ = await stage.run(spec, FOREVER, says("Found."), tools=SHOP)
    assert (result.stop_reason, result.answer) == (StopReason.ANSWERED, "Found.")


async def test_max_tool_calls_is_never_passed(stage: Stage) -> None:
    spec = agent(tool("search"), limits=limits(max_tool_calls=2))
    result, script = await stage.run(spec, *[FOREVER] * 3, says("So far."), tools=SHOP)
    assert (result.stop_reason, result.answer) == (StopReason.MAX_TOOL_CALLS, "So far.")
    assert (result.tool_calls, len(script.tool_calls), len(script.steps)) == (2, 2, 4)
    refused, words = script.steps[-1].append
    assert refused.content == "error: not done: the job has reached its limit max_tool_calls"
    assert words.role is Role.USER


async def test_max_tool_calls_stops_before_a_turn_that_would_pass_it(stage: Stage) -> None:
    spec = agent(tool("search"), max_parallel_tool_calls=3, limits=limits(max_tool_calls=2))
    three = calls(("search", {}), ("search", {}), ("search", {}))
    result, script = await stage.run(spec, three, says("Sorry."), tools=SHOP)
    assert (result.stop_reason, result.answer) == (StopReason.MAX_TOOL_CALLS, "Sorry.")
    assert script.tool_calls == []
    assert script.steps[0].output.max_calls == 2
    answered = [message.tool_call_id for message in script.steps[1].append[:3]]
    assert answered == [f"{script.steps[0].step_id}/{place}" for place in range(3)]


async def test_max_wall_time_ends_a_running_llm_step(stage: Stage) -> None:
    gate = Gate()
    spec = agent(limits=limits(max_wall_time=1))
    result, _ = await stage.run(spec, gate.step(says("Too late.")))
    assert result.stop_reason is StopReason.MAX_WALL_TIME
    assert (result.answer, result.llm_steps) == (None, 0)


async def test_max_wall_time_ends_a_running_tool(stage: Stage) -> None:
    gate = Gate()
    spec = agent(tool("search"), limits=limits(max_wall_time=1.5))
    result, _ = await stage.run(spec, FOREVER, tools={"search": gate.tool(returns("late"))})
    assert result.stop_reason is StopReason.MAX_WALL_TIME
    assert (result.turns, result.tool_calls) == (1, 1)


async def test_last_answer_has_time_of_its_own_when_wall_time_ends_a_tool(stage: Stage) -> None:
    """Of 20 s, 2 are kept back: what hangs is cancelled, and the model told so."""
    spec = agent(
        tool("slow"), tool("search"), max_parallel_tool_calls=2, limits=limits(max_wall_time=20)
    )
    gate = Gate()
    both = calls(("search", {}), ("slow", {}))
    tools = {"search": returns("3 left"), "slow": gate.tool(returns("late"))}
    result, script = await stage.run(spec, both, says("3 left."), tools=tools)
    assert (result.stop_reason, result.answer) == (StopReason.MAX_WALL_TIME, "3 left.")
    contents = [message.content for message in script.steps[1].append]
    assert contents[:2] == [
        "3 left",
        "error: not done: the job has reached its limit max_wall_time",
    ]


async def test_max_wall_time_cancels_no_tool_that_is_done(stage: Stage) -> None:
    spec = agent(
        tool("slow"), tool("search"), max_parallel_tool_calls=2, limits=limits(max_wall_time=1.5)
    )
    gate = Gate()
    tools = {"search": returns("3 left"), "slow": gate.tool(returns("late"))}
    result, script = await stage.run(spec, calls(("search", {}), ("slow", {})), tools=tools)
    assert result.stop_reason is StopReason.MAX_WALL_TIME
    assert {call.call.tool for call in script.tool_calls} == {"search", "slow"}


async def test_max_wall_time_holds_without_inference_service(temporal_client: Client) -> None:
    async with Stage(temporal_client, inference=False) as stage:
        result, script = await stage.run(agent(limits=limits(max_wall_time=1)))
    assert result.stop_reason is StopReason.MAX_WALL_TIME
    assert script.openings == 1


async def test_max_wall_time_holds_without_tool_worker(temporal_client: Client) -> None:
    async with Stage(temporal_client, tools=False) as stage:
        result, script = await stage.run(agent(limits=limits(max_wall_time=1)))
    assert result.stop_reason is StopReason.MAX_WALL_TIME
    assert script.openings == 0


async def test_transient_step_failures_are_retried_until_they_pass(skipping_stage: Stage) -> None:
    """Forty failures and their waits, some minutes, fail no job."""
    failures = iter(range(40))

    async def flaky(step: LLMStepInput) -> LLMStepResult:
        if next(failures, None) is not None:
            raise ConnectionError("the engine restarts")
        return await says("At last.")(step)

    result, script = await skipping_stage.run(agent(), flaky)
    assert result.answer == "At last."
    assert len(script.steps) == 41
    assert len({step.step_id for step in script.steps}) == 1


async def test_step_that_keeps_failing_is_stopped_by_wall_time(skipping_stage: Stage) -> None:
    async def down(step: LLMStepInput) -> LLMStepResult:
        raise ConnectionError("the engine is down")

    spec = agent(limits=limits(max_wall_time=600))
    result, script = await skipping_stage.run(spec, down)
    assert result.stop_reason is StopReason.MAX_WALL_TIME
    assert len(script.steps) > 50


async def test_tool_that_keeps_failing_is_stopped_by_wall_time(skipping_stage: Stage) -> None:
    async def down(call: CallToolInput) -> CallToolResult:
        raise ConnectionError("the shop is closed")

    spec = agent(
        tool("search", retry={"max_attempts": 20, "initial_interval": 30}),
        limits=limits(max_wall_time=100),
    )
    result, script = await skipping_stage.run(spec, FOREVER, tools={"search": down})
    assert result.stop_reason is StopReason.MAX_WALL_TIME
    assert 2 <= len(script.tool_calls) <= 5


async def test_gate_is_never_left_behind(stage: Stage) -> None:
    """Two jobs do not disturb each other: one waits while the other ends."""
    gate = Gate()
    waiting, _ = await stage.start(agent(), gate.step(says("Second.")))
    await within(gate.reached.wait())
    result, _ = await stage.run(agent(), says("First."))
    assert result.answer == "First."
    gate.opened.set()
    assert (await within(asyncio.ensure_future(waiting.result()))).answer == "Second."
