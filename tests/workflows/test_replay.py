"""Jobs outlive their workers: what is cached may be lost at any time, and histories replay."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from temporalio.client import WorkflowFailureError, WorkflowHistory
from temporalio.workflow import NondeterminismError

from contracts.job import StopReason
from contracts.llm_step import LLMStepInput, LLMStepResult
from contracts.message import Role
from tests.workflows.changed import CHANGED
from tests.workflows.kind_of_job import DIRECTORY, KINDS, SEARCH, SHOP, SPEC, long_job
from tests.workflows.peer import (
    STEP_USAGE,
    Gate,
    Tool,
    calls,
    raises,
    returns,
    says,
)
from tests.workflows.stage import (
    DEADLINE_S,
    JobHandle,
    Stage,
    agent,
    progress,
    replay,
    within,
)

HISTORIES = sorted(DIRECTORY.glob("*.json"))


def saved(path: Path) -> WorkflowHistory:
    """Return a history saved from the Temporal UI or by `record_history`."""
    history = WorkflowHistory.from_json(path.stem, path.read_text())
    begun = history.events[0].workflow_execution_started_event_attributes
    return WorkflowHistory(begun.workflow_id or path.stem, history.events)


async def test_job_goes_on_when_its_worker_is_replaced_during_an_llm_step(stage: Stage) -> None:
    gate = Gate()
    replies = list(long_job())
    replies[1] = gate.step(replies[1])
    handle, script = await stage.start(SPEC, *replies, tools=SHOP)
    await within(gate.reached.wait())
    await stage.stop_agent_worker()
    gate.opened.set()
    await stage.start_agent_worker()
    result = await within(handle.result())
    assert (result.answer, result.turns, result.tool_calls) == ("Done.", 4, 3)
    assert len(script.steps) == len({step.step_id for step in script.steps}) == 4


@pytest.mark.parametrize(
    ("made", "told"),
    [(returns("3 left"), "3 left"), (raises("the shelf fell"), "error: ")],
    ids=["made", "failed for good"],
)
async def test_calls_of_a_message_whose_worker_crashed_are_answered_by_the_next_worker(
    stage: Stage, made: Tool, told: str
) -> None:
    """Case J6: history ends with the message; no worker has seen it yet."""
    gate = Gate()
    two = calls(("search", {"n": 1}), ("search", {"n": 2}))
    handle, script = await stage.start(
        SPEC, gate.step(two), says("Done."), tools={**SHOP, "search": made}
    )
    await within(gate.reached.wait())
    await stage.stop_agent_worker()
    gate.opened.set()
    async with asyncio.timeout(DEADLINE_S):
        while not await _has_the_message(handle):
            pass  # each look is a call to the server
    assert script.tool_calls == []
    await stage.start_agent_worker()
    result = await within(handle.result())
    assert (result.answer, result.llm_steps, result.tool_calls) == ("Done.", 2, 2)
    append = script.steps[1].append
    asked = [f"{script.steps[0].step_id}/{place}" for place in range(2)]
    assert [message.tool_call_id for message in append] == asked, "each call has one answer"
    assert all(message.role is Role.TOOL for message in append)
    assert all(message.content.startswith(told) for message in append)


async def _has_the_message(handle: JobHandle) -> bool:
    """Tell whether the first LLM step's result is the last thing that history knows."""
    events = (await handle.fetch_history()).events
    done = [e for e in events if e.HasField("activity_task_completed_event_attributes")]
    return len(done) == 2


async def test_job_goes_on_when_its_worker_is_replaced_between_tool_calls(stage: Stage) -> None:
    """The first of two parallel calls is done, the second is not, when the worker goes."""
    gate = Gate()
    tools: dict[str, Tool] = {**SHOP, "read": gate.tool(returns("text"))}
    both = calls(("search", {}), ("read", {}))
    handle, script = await stage.start(SPEC, SEARCH, both, says("Done."), tools=tools)
    await within(gate.reached.wait())
    await stage.stop_agent_worker()
    await stage.start_agent_worker()
    gate.opened.set()
    result = await within(handle.result())
    assert (result.answer, result.tool_calls) == ("Done.", 3)
    assert [message.content for message in script.steps[2].append] == ["3 left", "text"]
    assert len(script.tool_calls) == 3


async def test_job_replayed_at_every_task_ends_the_same(stage: Stage) -> None:
    """Without a cache each workflow task replays the job from its start."""
    cached, _ = await stage.run(SPEC, *long_job(), tools=SHOP)
    await stage.stop_agent_worker()
    await stage.start_agent_worker(max_cached_workflows=0)
    result, script = await stage.run(SPEC, *long_job(), tools=SHOP)
    assert result == cached
    assert result.stop_reason is StopReason.ANSWERED
    assert len(script.tool_calls) == 3


async def test_cancellation_reaches_a_job_whose_worker_was_replaced(stage: Stage) -> None:
    gate = Gate()
    handle, _ = await stage.start(agent(), gate.step(says("Never said.")))
    await within(gate.reached.wait())
    await stage.stop_agent_worker()
    await handle.cancel()
    await stage.start_agent_worker()
    await within(gate.cancelled.wait())
    with pytest.raises(WorkflowFailureError):
        await within(handle.result())
    assert (await progress(handle)).usage == STEP_USAGE


async def test_reset_job_takes_a_branch_of_its_own(stage: Stage) -> None:
    """Right after its start: run ids of the same minute begin alike."""
    asked: list[str] = []

    async def reply(step: LLMStepInput) -> LLMStepResult:
        asked.append(step.step_id)
        return await says("Done.")(step)

    handle, _ = await stage.start(agent(), reply)
    await within(handle.result())
    again = await stage.reset_to_first_step(handle)
    assert (await within(again.result())).answer == "Done."
    first, second = asked
    assert first != second
    assert first.rpartition("/")[2] == second.rpartition("/")[2] == "1"


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
async def test_saved_history_replays(path: Path) -> None:
    """Case J8: each kind of job, recorded by the version that had it first."""
    await replay(saved(path))


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
async def test_changed_workflow_fails_replay(path: Path) -> None:
    with pytest.raises(NondeterminismError):
        await replay(saved(path), CHANGED)


@pytest.mark.parametrize("name", KINDS)
def test_there_is_a_saved_history_of_each_kind(name: str) -> None:
    assert DIRECTORY / f"{name}.json" in HISTORIES
