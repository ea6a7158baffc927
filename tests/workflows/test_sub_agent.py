"""A sub-agent is a job of its own: its answer is read, and what it used is its caller's."""

from __future__ import annotations

from datetime import timedelta

import pytest
from pydantic import ValidationError
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError
from temporalio.exceptions import ApplicationError, CancelledError

from contracts.agent import AgentSpec, OnFailure, SubAgent
from contracts.job import AgentJobInput, JobStatus, StopReason
from contracts.llm_step import LLMStepInput, LLMStepResult, Usage
from contracts.message import Message, Role
from muster.job import Jobs
from tests.workflows.peer import (
    STEP_USAGE,
    Gate,
    Reply,
    Script,
    calls,
    raises,
    returns,
    says,
)
from tests.workflows.stage import JobHandle, Stage, agent, limits, tool, within

ASK = calls(("helper", {"task": "Find the price."}))


def helper(spec: AgentSpec | None = None, **policy: object) -> SubAgent:
    """A sub-agent named `helper`."""
    called = spec or agent(name="finder")
    return SubAgent.model_validate(
        {"name": "helper", "description": "Finds things.", "agent": called, **policy}
    )


def uses(reply: Reply, tokens: int) -> Reply:
    """Reply as `reply`, of a step that used so many tokens."""

    async def step(given: LLMStepInput) -> LLMStepResult:
        usage = Usage(prompt_tokens=tokens - 10, completion_tokens=10)
        return (await reply(given)).model_copy(update={"usage": usage})

    return step


def sub_job(stage: Stage, handle: JobHandle) -> str:
    """Return the id of the one job that a job's sub-agent is."""
    [found] = [name for name in stage.peer.scripts if name.startswith(f"{handle.id}-")]
    return found


async def test_sub_agents_answer_is_read_and_its_use_is_its_callers(stage: Stage) -> None:
    spec = agent(agents=[helper(agent(tool("search"), name="finder"))])
    script = Script((calls(("search", {})), says("3 euros.")), tools={"search": returns("3 euros")})
    handle, caller = await stage.start(spec, ASK, says("It is 3."), sub_agents={"finder": script})
    result = await within(handle.result())
    assert result.answer == "It is 3."
    assert [m.content for m in caller.steps[1].append] == ["3 euros."]
    assert script.steps[0].append[-1].content == "Find the price."
    assert (result.turns, result.llm_steps, result.tool_calls) == (2, 4, 2)
    assert result.usage == sum([STEP_USAGE] * 4, Usage())
    assert result.engine_s == 4 * 0.75
    report = await Jobs(stage.client).report(handle.id)
    assert (report.usage, report.llm_steps, report.tool_calls) == (result.usage, 4, 2)
    [row] = report.rows[0].tools
    assert (row.tool, row.content, row.sub_job) == ("finder", "3 euros.", sub_job(stage, handle))
    own = await Jobs(stage.client).report(sub_job(stage, handle))
    assert (own.status, own.agent) == (JobStatus.COMPLETED, "finder")


async def test_budget_counts_what_a_sub_agent_used_and_refuses_the_next_step(
    stage: Stage,
) -> None:
    """Case J9: the roll-up is the sum, and the limit ends the job before its next step."""
    spec = agent(agents=[helper()], limits=limits(max_tokens=10_000, last_answer_tokens=0))
    script = Script((uses(says("Much was read."), 9_900),))
    handle, caller = await stage.start(
        spec, uses(ASK, 150), says("never"), sub_agents={"finder": script}
    )
    result = await within(handle.result())
    assert result.stop_reason is StopReason.MAX_TOKENS
    assert result.usage.prompt_tokens + result.usage.completion_tokens == 10_050
    assert len(caller.steps) == 1


async def test_sub_agent_gets_what_is_left_of_each_limit(stage: Stage) -> None:
    seen: list[AgentSpec] = []
    own = agent(name="finder", limits=limits(max_tokens=50_000, max_llm_steps=9))
    spec = agent(
        agents=[helper(own)],
        max_parallel_tool_calls=2,
        limits=limits(
            max_tokens=10_070,
            max_llm_steps=11,
            max_tool_calls=12,
            max_engine_time=20.75,
            max_wall_time=100,
        ),
    )
    both = calls(("helper", {"task": "One."}), ("helper", {"task": "Two."}))
    script = Script((says("Done."),))
    handle, _ = await stage.start(spec, both, says("Ok."), sub_agents={"finder": script})
    await within(handle.result())
    for name in stage.peer.scripts:
        if name.startswith(f"{handle.id}-"):
            history = await stage.client.get_workflow_handle(name).fetch_history()
            started = history.events[0].workflow_execution_started_event_attributes
            job = AgentJobInput.model_validate_json(started.input.payloads[0].data)
            seen.append(job.agent)
    assert len(seen) == 2
    for each in seen:
        assert each.limits.max_tokens == 5_000
        assert each.limits.max_llm_steps == 5
        assert each.limits.max_tool_calls == 5
        assert each.limits.max_engine_time == timedelta(seconds=10)
        assert timedelta(seconds=80) < each.limits.max_wall_time <= timedelta(seconds=90)


async def test_sub_agent_that_a_limit_stops_says_so(stage: Stage) -> None:
    own = agent(tool("search"), name="finder", limits=limits(max_turns=1))
    script = Script((calls(("search", {})), says("Maybe 3.")), tools={"search": returns("?")})
    result, caller = await stage.run(
        agent(agents=[helper(own)]), ASK, says("Ok."), sub_agents={"finder": script}
    )
    assert [m.content for m in caller.steps[1].append] == [
        "Maybe 3.\n(It had to stop at its limit max_turns.)"
    ]
    assert result.llm_steps == 4


async def test_failed_sub_agent_is_told_to_the_model_and_paid_for(stage: Stage) -> None:
    own = agent(tool("search", on_failure=OnFailure.FAIL_JOB), name="finder")
    script = Script((calls(("search", {})),), tools={"search": raises("no shop")})
    handle, caller = await stage.start(
        agent(agents=[helper(own)]), ASK, says("Sorry."), sub_agents={"finder": script}
    )
    result = await within(handle.result())
    assert [m.content for m in caller.steps[1].append] == ["error: tool 'search' failed: no shop"]
    assert (result.llm_steps, result.tool_calls) == (3, 2)
    assert result.usage == sum([STEP_USAGE] * 3, Usage())
    assert (await Jobs(stage.client).report(handle.id)).usage == result.usage


async def test_policy_may_let_a_failed_sub_agent_fail_the_job(stage: Stage) -> None:
    own = agent(tool("search", on_failure=OnFailure.FAIL_JOB), name="finder")
    script = Script((calls(("search", {})),), tools={"search": raises("no shop")})
    called = helper(own, on_failure=OnFailure.FAIL_JOB)
    handle, _ = await stage.start(agent(agents=[called]), ASK, sub_agents={"finder": script})
    with pytest.raises(WorkflowFailureError) as caught:
        await within(handle.result())
    cause = caught.value.cause
    assert isinstance(cause, ApplicationError)
    assert cause.message == "sub-agent 'helper' failed: tool 'search' failed: no shop"
    assert cause.details[-1]["llm_steps"] == 2


async def test_cancellation_reaches_the_sub_agent_and_waits_for_it(stage: Stage) -> None:
    gate = Gate()
    script = Script((gate.step(says("never")),))
    handle, _ = await stage.start(agent(agents=[helper()]), ASK, sub_agents={"finder": script})
    await within(gate.reached.wait())
    await handle.cancel()
    with pytest.raises(WorkflowFailureError) as caught:
        await within(handle.result())
    assert isinstance(caught.value.cause, CancelledError)
    assert gate.cancelled.is_set()
    described = await stage.client.get_workflow_handle(sub_job(stage, handle)).describe()
    assert described.status is WorkflowExecutionStatus.CANCELED


async def test_sub_agent_goes_on_when_its_worker_is_replaced(stage: Stage) -> None:
    gate = Gate()
    script = Script((gate.step(says("3 euros.")),))
    handle, _ = await stage.start(
        agent(agents=[helper()]), ASK, says("It is 3."), sub_agents={"finder": script}
    )
    await within(gate.reached.wait())
    await stage.stop_agent_worker()
    gate.opened.set()
    await stage.start_agent_worker(max_cached_workflows=0)
    result = await within(handle.result())
    assert (result.answer, result.usage) == ("It is 3.", sum([STEP_USAGE] * 3, Usage()))
    assert len(script.steps) == 1


async def test_agents_call_agents_two_levels_down(stage: Stage) -> None:
    inner = agent(name="inner")
    middle = agent(name="finder", agents=[helper(inner)])
    scripts = {"finder": Script((ASK, says("From below: 3.")))}
    scripts["finder"].sub_agents["inner"] = Script((says("3."),))
    result, caller = await stage.run(
        agent(agents=[helper(middle)]), ASK, says("3."), sub_agents=scripts
    )
    assert [m.content for m in caller.steps[1].append] == ["From below: 3."]
    assert result.llm_steps == 5
    assert result.usage == sum([STEP_USAGE] * 5, Usage())


def test_agents_that_call_agents_too_deep_are_refused() -> None:
    three = agent(agents=[helper(agent(agents=[helper()]))])
    with pytest.raises(ValidationError, match="4 levels deep, the limit is 3"):
        agent(agents=[helper(three)])


def test_sub_agent_may_not_have_a_tools_name() -> None:
    with pytest.raises(ValidationError, match="two tools are named 'helper'"):
        agent(tool("helper"), agents=[helper()])


@pytest.mark.parametrize("task", [{}, {"task": ""}, {"task": 7}])
async def test_call_without_a_task_is_answered_with_an_error(
    stage: Stage, task: dict[str, int | str]
) -> None:
    async def asks(step: LLMStepInput) -> LLMStepResult:
        return await calls(("helper", dict(task)))(step)

    _, caller = await stage.run(agent(agents=[helper()]), asks, says("Ok."))
    assert caller.steps[1].append == (
        Message(
            role=Role.TOOL,
            content="error: helper takes its task as text",
            tool_call_id=f"{caller.steps[0].step_id}/0",
            tool="helper",
        ),
    )
