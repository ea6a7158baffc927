"""The inference service is told of a job's end where it cannot see it, and only there."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from temporalio.client import WorkflowFailureError

from contracts.agent import OnFailure
from contracts.job import AgentJobInput, StopReason
from contracts.llm_step import SessionHint, SessionState
from tests.workflows.peer import Gate, calls, raises, returns, says
from tests.workflows.stage import MODEL, Stage, agent, limits, tool, within

SEARCH = calls(("search", {}))


def ended(job_id: str) -> list[SessionHint]:
    """Return the one hint of a job's end."""
    return [SessionHint(job_id=job_id, state=SessionState.ENDED)]


async def test_job_that_answers_gives_no_hint(stage: Stage) -> None:
    _, script = await stage.run(
        agent(tool("search")), SEARCH, says("Done."), tools={"search": returns("3 left")}
    )
    assert script.hints == []


async def test_job_cancelled_between_steps_says_that_it_has_ended(stage: Stage) -> None:
    gate = Gate()
    handle, script = await stage.start(
        agent(tool("search")), SEARCH, tools={"search": gate.tool(returns("never"))}
    )
    await within(gate.reached.wait())
    await handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await within(handle.result())
    assert script.hints == ended(handle.id)


async def test_job_cancelled_during_a_step_gives_no_hint(stage: Stage) -> None:
    """The service has seen the cancellation itself."""
    gate = Gate()
    handle, script = await stage.start(
        agent(tool("search")),
        SEARCH,
        gate.step(says("Never said.")),
        tools={"search": returns("3 left")},
    )
    await within(gate.reached.wait())
    await handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await within(handle.result())
    assert script.hints == []


async def test_last_answer_is_the_end_that_the_service_sees_itself(stage: Stage) -> None:
    spec = agent(tool("search"), limits=limits(max_turns=1))
    handle, script = await stage.start(
        spec, SEARCH, says("So far."), tools={"search": returns("3 left")}
    )
    await within(handle.result())
    assert script.hints == []


async def test_job_that_a_limit_stops_without_an_answer_says_that_it_has_ended(
    stage: Stage,
) -> None:
    spec = agent(tool("search"), limits=limits(max_tool_calls=1, last_answer_tokens=0))
    handle, script = await stage.start(spec, SEARCH, SEARCH, tools={"search": returns("3 left")})
    result = await within(handle.result())
    assert result.stop_reason is not StopReason.ANSWERED
    assert script.hints == ended(handle.id)


async def test_job_that_a_tool_fails_says_that_it_has_ended(stage: Stage) -> None:
    spec = agent(tool("search", on_failure=OnFailure.FAIL_JOB))
    handle, script = await stage.start(spec, SEARCH, tools={"search": raises("no shop")})
    with pytest.raises(WorkflowFailureError):
        await within(handle.result())
    assert script.hints == ended(handle.id)


async def test_job_ends_though_nobody_takes_the_hint(stage: Stage) -> None:
    gate = Gate()
    handle, script = await stage.start(
        agent(tool("search")), SEARCH, tools={"search": gate.tool(returns("never"))}
    )
    await within(gate.reached.wait())
    await stage.stop_inference()
    await handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await within(handle.result())
    assert script.hints == []


async def test_deadline_goes_with_each_step_only_if_the_job_has_one(stage: Stage) -> None:
    deadline = datetime.now(UTC) + timedelta(hours=1)
    for given in (None, deadline):
        job = AgentJobInput(agent=agent(), input="Two apples.", model=MODEL, deadline=given)
        handle, script = await stage.start_input(job, says("Done."))
        await within(handle.result())
        assert [step.hints.deadline for step in script.steps] == [given]
