"""Calls of remote activities in long jobs, and large results that nobody can store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from temporalio import activity
from temporalio.client import WorkflowFailureError
from temporalio.worker import Worker

from contracts.agent import AgentSpec, ToolRef
from contracts.limit import INLINE_RESULT_BYTES
from tests.workflows.peer import calls, says
from tests.workflows.stage import Stage, agent, limits, within
from workflows import option

ASK = calls(("ask", {"item": "apples"}))
TURNS = 12


def asker(queue: str, **policy: Any) -> AgentSpec:
    """An agent with one remote activity."""
    remote = {
        "type": "ask",
        "queue": queue,
        "description": "Ask.",
        "arguments": {"type": "object"},
    }
    tool = ToolRef.model_validate({"activity": remote, **policy})
    return agent(tool, limits=limits(max_turns=100, max_tool_calls=100, max_tokens=10**9))


@asynccontextmanager
async def answering(stage: Stage, result: str) -> AsyncIterator[tuple[str, list[str]]]:
    """Serve the activity; give its task queue, and the ids of the calls that it gets."""
    queue, ids = f"theirs-{uuid4().hex[:8]}", list[str]()

    @activity.defn
    async def ask(_: dict[str, Any]) -> str:
        ids.append(activity.info().activity_id)
        return result

    async with Worker(stage.client, task_queue=queue, activities=[ask]):
        yield queue, ids


async def test_a_job_that_rolls_over_makes_each_call_once_under_a_key_of_its_own(
    rolling_stage: Stage,
) -> None:
    async with answering(rolling_stage, "3 left") as (queue, ids):
        handle, script = await rolling_stage.start(
            asker(queue, max_calls=TURNS), *[ASK] * TURNS, says("Done.")
        )
        result = await within(handle.result())
        assert len(await rolling_stage.histories(handle)) >= 2
    assert (result.answer, result.tool_calls) == ("Done.", TURNS)
    assert len(ids) == len(set(ids)) == TURNS
    assert [step.append[0].tool_call_id for step in script.steps[1:]] == ids
    assert {step.append[0].content for step in script.steps[1:]} == {"3 left"}


@pytest.mark.parametrize("on_failure", ["tell_model", "fail_job"])
async def test_a_large_result_that_no_tool_worker_stores_is_one_error_with_its_size(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, on_failure: str
) -> None:
    """The tool worker of this stage has no `keep_result`, like one of an older version."""
    monkeypatch.setattr(option, "KEEP_RESULT_TIMEOUT", timedelta(seconds=1.5))
    said = f"its result of {INLINE_RESULT_BYTES + 3:,} bytes could not be stored: Activity function"
    async with answering(stage, "x" * (INLINE_RESULT_BYTES + 1)) as (queue, ids):
        handle, script = await stage.start(
            asker(queue, on_failure=on_failure), ASK, says("It was too much.")
        )
        if on_failure == "fail_job":
            with pytest.raises(WorkflowFailureError) as failed:
                await within(handle.result())
            assert f"tool 'ask' failed: {said}" in str(failed.value.cause)
        else:
            assert (await within(handle.result())).answer == "It was too much."
            assert script.steps[1].append[0].content.startswith(f"error: {said}")
    assert len(ids) == 1, "the call itself was made once"


async def test_a_result_at_the_limit_stands_in_history_itself(stage: Stage) -> None:
    """Nothing stores it: the tool worker of this stage could not."""
    largest = "x" * (INLINE_RESULT_BYTES - len('""'))
    async with answering(stage, largest) as (queue, _):
        _, script = await stage.run(asker(queue), ASK, says("Read."))
    assert script.steps[1].append[0].content == largest
