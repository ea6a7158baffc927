"""A paused job schedules nothing new, and goes on where it stood."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from temporalio.client import WorkflowFailureError, WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError, CancelledError

from contracts.approval import PauseRequest
from contracts.job import StopReason
from contracts.llm_step import SessionState
from contracts.name import PAUSE_UPDATE, RESUME_UPDATE
from muster.job import Jobs
from muster.job_message import new_message
from tests.workflows.peer import Gate, calls, returns, says
from tests.workflows.stage import JobHandle, Stage, agent, limits, progress, tool, within
from tests.workflows.test_approval import PAY, decide, pending, shop, waits
from tests.workflows.test_roll_over import patient

SEARCH = calls(("search", {}))
SPEC = agent(tool("search"))


async def ask(handle: JobHandle, update: str, request_id: str | None = None, by: str = "") -> None:
    """Pause or resume a job."""
    request = PauseRequest(id=request_id or uuid4().hex, by=by or "ann", reason="Lunch.")
    await handle.execute_update(update, request, id=uuid4().hex)


async def until_doing(handle: JobHandle, part: str) -> None:
    """Wait until a job says `part` of what it does."""
    async with asyncio.timeout(30):
        while part not in (await progress(handle)).doing:
            await asyncio.sleep(0.02)


async def held(stage: Stage, **fields: Any) -> tuple[JobHandle, Any, Gate]:
    """Start a job and pause it while its one tool call runs."""
    gate = Gate()
    spec = agent(tool("search"), **fields)
    tools = {"search": gate.tool(returns("3 left"))}
    handle, script = await stage.start(spec, SEARCH, says("Done."), tools=tools)
    await within(gate.reached.wait())
    await ask(handle, PAUSE_UPDATE)
    return handle, script, gate


async def test_paused_job_ends_what_runs_and_starts_nothing(stage: Stage) -> None:
    handle, script, gate = await held(stage)
    found = (await waits(handle)).paused
    assert found is not None
    assert (found.by, found.reason) == ("ann", "Lunch.")
    gate.opened.set()
    await until_doing(handle, f"paused by ann: muster resume {handle.id}")
    async with asyncio.timeout(30):
        while not script.hints:
            await asyncio.sleep(0.02)
    assert [hint.state for hint in script.hints] == [SessionState.WAITING]
    assert len(script.steps) == 1
    await ask(handle, RESUME_UPDATE)
    assert (await within(handle.result())).answer == "Done."
    assert len(script.steps) == 2


async def test_pause_that_is_sent_again_counts_once(stage: Stage) -> None:
    handle, _, gate = await held(stage)
    with pytest.raises(WorkflowUpdateFailedError) as caught:
        await ask(handle, PAUSE_UPDATE, by="bob")
    assert isinstance(caught.value.cause, ApplicationError)
    assert caught.value.cause.message == "the job is paused already, by ann"
    await ask(handle, RESUME_UPDATE, "a")
    await ask(handle, RESUME_UPDATE, "a")
    with pytest.raises(WorkflowUpdateFailedError):
        await ask(handle, RESUME_UPDATE)
    await ask(handle, PAUSE_UPDATE, "b")
    await ask(handle, RESUME_UPDATE, "a")
    assert (await waits(handle)).paused, "a resumption of before ends no later pause"
    await ask(handle, RESUME_UPDATE)
    gate.opened.set()
    await within(handle.result())


async def test_paused_job_can_be_cancelled(stage: Stage) -> None:
    handle, script, gate = await held(stage)
    gate.opened.set()
    await until_doing(handle, "paused")
    await handle.cancel()
    with pytest.raises(WorkflowFailureError) as caught:
        await within(handle.result())
    assert isinstance(caught.value.cause, CancelledError)
    assert len(script.steps) == 1


async def test_wall_time_goes_on_while_a_job_is_paused(stage: Stage) -> None:
    handle, script, gate = await held(stage, limits=limits(max_wall_time=timedelta(seconds=2)))
    gate.opened.set()
    result = await within(handle.result())
    assert (result.answer, result.stop_reason) == (None, StopReason.MAX_WALL_TIME)
    assert len(script.steps) == 1


async def test_pause_holds_over_roll_overs_and_lost_workers(rolling_stage: Stage) -> None:
    handle, script, gate = await held(rolling_stage, limits=patient())
    gate.opened.set()
    await until_doing(handle, "paused")
    for _ in range(2):
        runs = len(await rolling_stage.histories(handle))
        while len(await rolling_stage.histories(handle)) == runs:
            await Jobs(rolling_stage.client).send(handle.id, new_message("More.", None))
    await rolling_stage.stop_agent_worker()
    await rolling_stage.start_agent_worker(max_cached_workflows=0)
    assert (await waits(handle)).paused
    assert len(script.steps) == 1
    await ask(handle, RESUME_UPDATE)
    assert (await within(handle.result())).answer == "Done."


async def test_job_paused_before_its_first_step_takes_none(stage: Stage) -> None:
    gate = Gate()

    async def opens(opening: Any) -> Any:
        from tests.workflows.peer import opens as usual

        await gate.stand()
        return await usual(opening)

    handle, script = await stage.start(SPEC, says("Done."), opening=opens)
    await within(gate.reached.wait())
    await ask(handle, PAUSE_UPDATE)
    gate.opened.set()
    await until_doing(handle, "paused")
    assert script.steps == []
    assert script.hints == []
    await ask(handle, RESUME_UPDATE)
    await within(handle.result())


async def test_approved_call_of_a_paused_job_waits_for_its_resumption(stage: Stage) -> None:
    tools = {"pay": returns("paid")}
    handle, script = await stage.start(shop(), PAY, says("Done."), tools=tools)
    [call] = await pending(handle)
    await ask(handle, PAUSE_UPDATE)
    await decide(handle, call.call_id)
    assert (await waits(handle)).pending == ()
    await until_doing(handle, "paused")
    assert script.tool_calls == []
    await ask(handle, RESUME_UPDATE)
    await within(handle.result())
    assert len(script.tool_calls) == 1
