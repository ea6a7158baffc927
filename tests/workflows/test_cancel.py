"""A cancelled job: whatever runs is cancelled and awaited, its usage counted, the job Cancelled."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from temporalio import activity
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError
from temporalio.common import SearchAttributeKey
from temporalio.exceptions import ApplicationError, CancelledError

from contracts.job import OpenJobInput, OpenJobResult
from contracts.llm_step import LLMStepInput, LLMStepResult, Usage
from contracts.name import SEARCH_STATE
from contracts.tool import CallToolInput, CallToolResult
from tests.workflows.peer import STEP_USAGE, Gate, calls, opens, returns, says
from tests.workflows.stage import JobHandle, Stage, agent, current_details, progress, tool, within
from workflows import option

SEARCH = calls(("search", {}))


async def cancel(handle: JobHandle) -> None:
    """Cancel a job and wait until it has ended so."""
    await handle.cancel()
    with pytest.raises(WorkflowFailureError) as caught:
        await within(handle.result())
    assert isinstance(caught.value.cause, CancelledError)
    described = await handle.describe()
    assert described.status is WorkflowExecutionStatus.CANCELED
    state = SearchAttributeKey.for_keyword(SEARCH_STATE)
    assert described.typed_search_attributes.get(state) == "cancelled"
    assert (await progress(handle)).doing == "cancelled"


async def test_cancel_during_llm_step_counts_what_it_has_used(stage: Stage) -> None:
    gate = Gate()
    handle, _ = await stage.start(agent(), gate.step(says("Never said.")))
    await within(gate.reached.wait())
    await cancel(handle)
    assert gate.cancelled.is_set()
    assert (await progress(handle)).usage == STEP_USAGE
    assert f"| {STEP_USAGE.completion_tokens} |" in await current_details(handle)


async def test_cancel_waits_for_the_step_to_say_what_it_has_used(stage: Stage) -> None:
    gate, counted = Gate(), asyncio.Event()

    async def reply(step: LLMStepInput) -> LLMStepResult:
        result = await gate.step(says("Never said."))(step)
        await counted.wait()
        return result

    handle, _ = await stage.start(agent(), reply)
    await within(gate.reached.wait())
    await handle.cancel()
    await within(gate.cancelled.wait())
    assert (await handle.describe()).status is WorkflowExecutionStatus.RUNNING
    counted.set()
    await cancel_has_ended(handle)
    assert (await progress(handle)).usage == STEP_USAGE


async def cancel_has_ended(handle: JobHandle) -> None:
    """Wait until a job has ended cancelled."""
    with pytest.raises(WorkflowFailureError) as caught:
        await within(handle.result())
    assert isinstance(caught.value.cause, CancelledError)


async def test_step_that_finishes_in_spite_of_the_cancellation_does_not_go_on(
    stage: Stage,
) -> None:
    """The step was just about to finish: its usage counts, its answer comes too late."""
    gate = Gate()

    async def reply(step: LLMStepInput) -> LLMStepResult:
        try:
            await gate.stand()
        except asyncio.CancelledError:
            return await SEARCH(step)
        raise AssertionError

    handle, script = await stage.start(agent(tool("search")), reply)
    await within(gate.reached.wait())
    await cancel(handle)
    assert script.tool_calls == []
    assert (await progress(handle)).usage == STEP_USAGE


async def test_step_that_fails_on_cancellation_leaves_the_job_cancelled(stage: Stage) -> None:
    gate = Gate()

    async def reply(step: LLMStepInput) -> LLMStepResult:
        try:
            await gate.stand()
        except asyncio.CancelledError:
            raise ApplicationError("engine lost", non_retryable=True) from None
        raise AssertionError

    handle, _ = await stage.start(agent(), reply)
    await within(gate.reached.wait())
    await cancel(handle)


async def test_cancel_while_tools_run_cancels_and_awaits_each(stage: Stage) -> None:
    gates = {"a": Gate(), "b": Gate()}
    handle, script = await stage.start(
        agent(tool("a"), tool("b"), max_parallel_tool_calls=2),
        calls(("a", {}), ("b", {})),
        tools={name: gate.tool(returns("never")) for name, gate in gates.items()},
    )
    for gate in gates.values():
        await within(gate.reached.wait())
    await cancel(handle)
    assert all(gate.cancelled.is_set() for gate in gates.values())
    assert len(script.steps) == 1
    assert (await progress(handle)).tool_calls == 2


async def test_cancel_while_a_tool_waits_for_its_retry(stage: Stage) -> None:
    failed = asyncio.Event()

    async def down(call: CallToolInput) -> CallToolResult:
        failed.set()
        raise ConnectionError("the shop is closed")

    retry = {"initial_interval": 3600, "max_interval": 3600}
    handle, script = await stage.start(
        agent(tool("search", retry=retry)), SEARCH, tools={"search": down}
    )
    await within(failed.wait())
    await cancel(handle)
    assert len(script.tool_calls) == 1


async def test_cancel_while_the_step_waits_for_an_inference_service(stage: Stage) -> None:
    async def reply(step: LLMStepInput) -> LLMStepResult:
        raise AssertionError

    opened = asyncio.Event()

    async def opening(opening: OpenJobInput) -> OpenJobResult:
        opened.set()
        return await opens(opening)

    handle, script = await stage.start(agent(), reply, opening=opening)
    await stage.stop_inference()
    await within(opened.wait())
    await cancel(handle)
    assert (await progress(handle)).usage == Usage()
    assert script.steps == []


async def test_cancel_while_the_job_is_being_opened(stage: Stage) -> None:
    gate = Gate()

    async def opening(opening: OpenJobInput) -> OpenJobResult:
        await gate.stand()
        return await opens(opening)

    handle, script = await stage.start(agent(), says("Never said."), opening=opening)
    await within(gate.reached.wait())
    await cancel(handle)
    assert script.steps == []


async def test_cancel_before_the_job_has_begun(stage: Stage) -> None:
    await stage.stop_agent_worker()
    handle, script = await stage.start(agent(), says("Never said."))
    await handle.cancel()
    await stage.start_agent_worker()
    await cancel_has_ended(handle)
    assert script.steps == []


async def test_a_cancelled_call_whose_worker_is_lost_is_not_made_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(option, "HEARTBEAT_TIMEOUT", timedelta(seconds=1))
    called = asyncio.Event()

    async def silent(call: CallToolInput) -> CallToolResult:
        called.set()
        activity.raise_complete_async()

    handle, script = await stage.start(
        agent(tool("search", retry={"max_attempts": 3})), SEARCH, tools={"search": silent}
    )
    await within(called.wait())
    await cancel(handle)
    assert len(script.tool_calls) == 1
