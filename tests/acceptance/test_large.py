"""Whole jobs with large contents, on Temporal, PostgreSQL and the simulated engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from uuid import uuid4

import pytest
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from activities.toolbox import Toolbox
from activities.worker import tool_activities
from contracts.agent import AgentSpec, Sampling, ToolRef
from contracts.job import AgentJobInput, AgentJobResult
from contracts.limit import HARD_TOOL_RESULT_BYTES
from contracts.message import Message, Role
from contracts.name import AGENT_WORKFLOW, AGENTS_QUEUE, TOOLS_QUEUE
from inference_service.engine.protocol import EngineRequest
from inference_service.engine.simulated import SimulatedConfig
from store.database import Database
from tests.activities.conftest import BAD
from tests.inference_service.harness import harness
from tests.inference_service.serving import serving
from workflows.worker import workflow_options

LONG = SimulatedConfig(time_scale=0.0, max_model_len=5_000_000, num_blocks=160_000)
DEADLINE_S = 60.0
Handle = WorkflowHandle[AgentJobInput, AgentJobResult]
READ = ToolRef(
    function=f"{BAD}:returns_large", name="read", max_result_bytes=HARD_TOOL_RESULT_BYTES
)


async def run(
    client: Client,
    database: Database,
    agent: AgentSpec,
    respond: Callable[[EngineRequest, str], str],
) -> Handle:
    """Run a job to its end, however it ends, on workers of its own."""
    job = AgentJobInput(agent=agent, input="How long is it?", model=f"m-{uuid4().hex[:12]}")
    async with AsyncExitStack() as stack:
        h = await stack.enter_async_context(harness(database, config=LONG, respond=respond))
        await stack.enter_async_context(serving(client, h, job.model))
        activities = tool_activities(database, Toolbox())
        await stack.enter_async_context(
            Worker(client, task_queue=TOOLS_QUEUE, activities=activities)
        )
        await stack.enter_async_context(
            Worker(
                client,
                task_queue=AGENTS_QUEUE,
                **workflow_options(),
            )
        )
        async with asyncio.timeout(DEADLINE_S):
            handle: Handle = await client.start_workflow(
                AGENT_WORKFLOW,
                job,
                id=f"job-{uuid4()}",
                task_queue=AGENTS_QUEUE,
                result_type=AgentJobResult,
            )
            with suppress(WorkflowFailureError):
                await handle.result()
    return handle


def reading(size: int, calls: int = 1) -> Callable[[EngineRequest, str], str]:
    """Return a model that reads, and then says how many of its text it has read."""

    def respond(request: EngineRequest, prompt: str) -> str:
        if thousands := prompt.count("x" * 1_000):
            return json.dumps({"answer": f"{thousands * 1_000:,} characters"})
        call = {"tool": "read", "arguments": {"n": size}}
        return json.dumps({"calls": [call] * calls} if calls > 1 else call)

    return respond


def reader(calls: int = 1) -> AgentSpec:
    return AgentSpec(
        name="reader",
        instructions="Read it.",
        tools=(READ,),
        max_parallel_tool_calls=calls,
        sampling=Sampling(max_tokens=32_768),
    )


@pytest.mark.parametrize(("size", "calls"), [(256_000, 1), (4_000_000, 1), (100_000, 32)])
async def test_the_model_reads_large_results_that_history_does_not_hold(
    temporal_client: Client, database: Database, size: int, calls: int
) -> None:
    """Case J2: stored by reference."""
    handle = await run(temporal_client, database, reader(calls), reading(size, calls))
    assert (await handle.result()).answer == f"{size * calls:,} characters"
    history = await handle.fetch_history()
    assert sum(event.ByteSize() for event in history.events) < 20_000 + calls * 4_000


async def test_a_result_that_no_context_window_holds_is_one_clear_error(
    temporal_client: Client, database: Database
) -> None:
    handle = await run(temporal_client, database, reader(), reading(30_000_000))
    with pytest.raises(WorkflowFailureError) as caught:
        await handle.result()
    failure = caught.value.cause
    assert isinstance(failure, ApplicationError)
    assert failure.type == "LimitExceededError"
    assert "the model's context window, has 30,0" in failure.message
    assert "the limit is 5,000,000 tokens" in failure.message
    tries = [
        event.activity_task_started_event_attributes.attempt
        for event in (await handle.fetch_history()).events
        if event.HasField("activity_task_started_event_attributes")
    ]
    assert tries == [1] * 4  # the opening, a step, the call, the step that cannot be


async def test_a_job_with_two_thousand_examples_runs(
    temporal_client: Client, database: Database
) -> None:
    roles = (Role.USER, Role.ASSISTANT)
    examples = tuple(Message(role=roles[n % 2], content=f"Example {n}.") for n in range(2_000))
    agent = reader().model_copy(update={"examples": examples})

    def respond(request: EngineRequest, prompt: str) -> str:
        return json.dumps({"answer": f"{prompt.count('Example')} examples"})

    handle = await run(temporal_client, database, agent, respond)
    assert (await handle.result()).answer == "2000 examples"
