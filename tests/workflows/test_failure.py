"""What fails a job, how it says so, and what does not."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from temporalio import activity
from temporalio.client import Client, WorkflowFailureError
from temporalio.common import SearchAttributeKey
from temporalio.exceptions import ApplicationError

from contracts.job import AgentJobInput, OpenJobInput, OpenJobResult
from contracts.llm_step import LLMStepInput, LLMStepResult, Outcome
from contracts.name import AGENT_WORKFLOW, AGENTS_QUEUE, SEARCH_STATE
from contracts.tool import CallToolInput, CallToolResult
from tests.workflows.peer import (
    Gate,
    answered,
    calls,
    finished,
    opens,
    raises,
    refuses,
    returns,
    says,
)
from tests.workflows.stage import MODEL, JobHandle, Stage, agent, progress, tool, within
from workflows import option

LONG = "the conversation has 9,000 tokens, the limit is 8,192 tokens"
HINT = "serve the model with a longer max_model_len"
SEARCH = calls(("search", {}))


async def failure_of(handle: JobHandle) -> ApplicationError:
    """Return what a job failed with."""
    with pytest.raises(WorkflowFailureError) as caught:
        await within(handle.result())
    cause = caught.value.cause
    assert isinstance(cause, ApplicationError)
    return cause


async def test_open_job_failure_is_the_jobs_own(stage: Stage) -> None:
    async def refuse(opening: OpenJobInput) -> OpenJobResult:
        raise ApplicationError(
            "tool 'search': no module named 'shop'",
            "check `function`",
            type="BadInputError",
            non_retryable=True,
        )

    handle, script = await stage.start(agent(tool("search")), opening=refuse)
    error = await failure_of(handle)
    assert error.message == "tool 'search': no module named 'shop'"
    assert (error.type, error.details[0]) == ("BadInputError", "check `function`")
    assert (script.openings, script.steps) == (1, [])
    state = SearchAttributeKey.for_keyword(SEARCH_STATE)
    assert (await handle.describe()).typed_search_attributes.get(state) == "failed"
    assert (await progress(handle)).doing == "failed: tool 'search': no module named 'shop'"


async def test_open_job_is_retried_when_the_database_is_away(skipping_stage: Stage) -> None:
    failures = iter(range(5))

    async def flaky(opening: OpenJobInput) -> OpenJobResult:
        if next(failures, None) is not None:
            raise ConnectionError("no database")
        return await opens(opening)

    result, script = await skipping_stage.run(agent(), says("Done."), opening=flaky)
    assert (result.answer, script.openings) == ("Done.", 6)


async def test_open_job_gives_up_after_a_bounded_time(skipping_stage: Stage) -> None:
    async def down(opening: OpenJobInput) -> OpenJobResult:
        raise ConnectionError("no database")

    handle, script = await skipping_stage.start(agent(), opening=down)
    error = await failure_of(handle)
    assert error.message == "the job could not be opened within 600 s: no database"
    assert script.openings > 10


async def test_job_fails_when_no_tool_worker_opens_it(
    temporal_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(option, "OPEN_JOB_TIMEOUT", timedelta(seconds=1))
    async with Stage(temporal_client, tools=False) as stage:
        handle, _ = await stage.start(agent())
        error = await failure_of(handle)
    assert error.message.startswith("the job could not be opened within 1 s: ")
    assert error.type == "OpenJobFailedError"


@pytest.mark.parametrize(
    ("words", "details"),
    [
        (LONG, (HINT,)),
        (f"{LONG} (hint: {HINT})", ({"message": LONG, "hint": HINT},)),
    ],
    ids=["hint", "message and hint"],
)
async def test_step_failure_fails_the_job_with_its_message_and_hint(
    stage: Stage, words: str, details: tuple[Any, ...]
) -> None:
    async def too_long(step: LLMStepInput) -> LLMStepResult:
        raise ApplicationError(words, *details, type="LimitExceededError", non_retryable=True)

    handle, script = await stage.start(agent(), too_long)
    error = await failure_of(handle)
    assert error.message == f"LLM step {script.steps[0].step_id} failed: {LONG}"
    assert error.type == "LimitExceededError"
    assert error.details[0] == HINT
    assert len(script.steps) == 1


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"message": None}, "no message, though it has finished"),
        ({"outcome": Outcome.CANCELLED}, "outcome cancelled without being asked"),
    ],
)
async def test_step_result_outside_the_protocol_fails_the_job(
    stage: Stage, change: dict[str, Any], found: str
) -> None:
    async def reply(step: LLMStepInput) -> LLMStepResult:
        return finished(step, None).model_copy(update=change)

    handle, _ = await stage.start(agent(), reply)
    error = await failure_of(handle)
    assert error.message.endswith(f"returned {found}")
    assert error.type == "LLMStepFailedError"


async def test_fail_job_policy_names_tool_and_cause(stage: Stage) -> None:
    handle, _ = await stage.start(
        agent(tool("pay", on_failure="fail_job")),
        calls(("pay", {})),
        tools={"pay": raises("card refused by bank", "ask for another card")},
    )
    error = await failure_of(handle)
    assert error.message == "tool 'pay' failed: card refused by bank"
    assert (error.type, error.details[0]) == ("ToolFailedError", "ask for another card")


async def test_fail_job_policy_leaves_the_models_own_mistakes_to_the_model(stage: Stage) -> None:
    result, _ = await stage.run(
        agent(tool("pay", on_failure="fail_job")),
        calls(("pay", {})),
        says("Sorry."),
        tools={"pay": refuses("error: amount must be positive")},
    )
    assert result.answer == "Sorry."


async def test_tool_that_fails_the_job_cancels_and_awaits_the_others(stage: Stage) -> None:
    gate = Gate()

    async def fails_once_the_other_runs(call: CallToolInput) -> CallToolResult:
        await gate.reached.wait()
        return await raises("card refused")(call)

    handle, _ = await stage.start(
        agent(tool("search"), tool("pay", on_failure="fail_job"), max_parallel_tool_calls=2),
        calls(("search", {}), ("pay", {})),
        tools={"search": gate.tool(returns("3 left")), "pay": fails_once_the_other_runs},
    )
    assert (await failure_of(handle)).message == "tool 'pay' failed: card refused"
    assert gate.cancelled.is_set()


async def test_attempts_are_bounded_and_told(stage: Stage) -> None:
    async def down(call: CallToolInput) -> CallToolResult:
        raise ConnectionError("the shop is closed")

    retry = {"max_attempts": 3, "initial_interval": 0.01}
    result, script = await stage.run(
        agent(tool("search", retry=retry)), SEARCH, says("Closed."), tools={"search": down}
    )
    assert result.answer == "Closed."
    assert len(script.tool_calls) == 3
    assert len({call.call.id for call in script.tool_calls}) == 1
    assert script.steps[1].append[0].content == "error: the shop is closed (3 attempts)"


async def test_retry_waits_as_long_as_the_tool_says(skipping_stage: Stage) -> None:
    failures = iter([timedelta(minutes=5)])

    async def busy(call: CallToolInput) -> CallToolResult:
        delay = next(failures, None)
        if delay is not None:
            raise ApplicationError("429 Too Many Requests", next_retry_delay=delay)
        return answered(call, "3 left")

    handle, script = await skipping_stage.start(
        agent(tool("search")), SEARCH, says("Found."), tools={"search": busy}
    )
    assert (await within(handle.result())).answer == "Found."
    assert len(script.tool_calls) == 2
    described = await handle.describe()
    assert described.close_time is not None
    assert described.close_time - described.start_time >= timedelta(minutes=5)


async def test_tool_timeout_is_told_with_its_name_and_value(stage: Stage) -> None:
    gate = Gate()
    result, script = await stage.run(
        agent(tool("search", timeout=0.5, retry={"max_attempts": 1})),
        SEARCH,
        says("Slow."),
        tools={"search": gate.tool(returns("3 left"))},
    )
    assert result.answer == "Slow."
    assert script.steps[1].append[0].content == "error: it took longer than its timeout of 0.5 s"


async def test_queue_timeout_is_told_with_its_name_and_value(stage: Stage) -> None:
    """The tool workers go away after the job was opened."""

    async def reply(step: LLMStepInput) -> LLMStepResult:
        await stage.stop_tools()
        return await SEARCH(step)

    spec = agent(tool("search", queue_timeout=1))
    result, script = await stage.run(spec, reply, says("Nobody there."))
    assert result.answer == "Nobody there."
    assert script.steps[1].append[0].content == (
        "error: no worker took it from task queue 'tools' within its queue_timeout of 1 s"
    )


@pytest.mark.parametrize("max_attempts", [1, 2])
async def test_call_whose_workers_were_lost_is_scheduled_again_if_it_may_be_retried(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, max_attempts: int
) -> None:
    """Two attempts fall silent, as if their processes were killed."""
    monkeypatch.setattr(option, "HEARTBEAT_TIMEOUT", timedelta(seconds=1))
    lost = iter(range(2))

    async def silent(call: CallToolInput) -> CallToolResult:
        if next(lost, None) is not None:
            activity.raise_complete_async()
        return answered(call, "3 left")

    retry = {"max_attempts": max_attempts, "initial_interval": 0.01}
    _, script = await stage.run(
        agent(tool("search", retry=retry)), SEARCH, says("Done."), tools={"search": silent}
    )
    (message,) = script.steps[1].append
    if max_attempts == 1:
        assert "its worker was lost" in message.content
    else:
        assert message.content == "3 left"
        assert [call.call.id for call in script.tool_calls] == [message.tool_call_id] * 3


async def test_job_that_can_neither_call_nor_answer_fails_at_once(stage: Stage) -> None:
    spec = agent(tool("search", max_calls=1), answer_after=["search"])
    handle, script = await stage.start(spec, SEARCH, tools={"search": refuses("error: no index")})
    error = await failure_of(handle)
    assert error.type == "NothingOfferedError"
    assert error.message == (
        "agent 'clerk' can go on no further: its answer waits for search, and no tool may be "
        "called (search was called 1 of 1 times, last error: error: no index)"
    )
    assert len(script.steps) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": "é" * 500_001}, "job input has 1,000,002 bytes, the limit is 1,000,000 bytes"),
        ({"tenant": "t" * 65}, "tenant name has 65 bytes, the limit is 64 bytes"),
        ({"model": ""}, "the job names no model"),
    ],
)
async def test_input_that_temporal_would_refuse_later_fails_the_job_now(
    stage: Stage, change: dict[str, Any], message: str
) -> None:
    fields = {"agent": agent(), "input": "hi", "model": MODEL, **change}
    handle, _ = await stage.start_input(AgentJobInput.model_validate(fields))
    error = await failure_of(handle)
    assert error.message == message
    assert error.details


async def test_input_that_grows_too_large_as_json_fails_the_job_now(stage: Stage) -> None:
    """Each quote takes two bytes: the payloads made of it would be larger than this one."""
    job = AgentJobInput(agent=agent(), input='"' * 960_000, model=MODEL)
    handle, script = await stage.start_input(job)
    error = await failure_of(handle)
    assert error.message.startswith("job input with its agent as JSON has 1,92")
    assert error.message.endswith("the limit is 1,900,000 bytes")
    assert script.openings == 0


async def test_malformed_start_input_fails_the_job(stage: Stage) -> None:
    handle: JobHandle = await stage.client.start_workflow(
        AGENT_WORKFLOW,
        {"agent": {"name": "clerk"}, "input": "", "model": MODEL},
        id="job-malformed",
        task_queue=AGENTS_QUEUE,
    )
    stage.handles.append(handle)
    error = await failure_of(handle)
    assert error.type == "ValidationError"
    assert "agent.instructions" in error.message
