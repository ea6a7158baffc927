"""The service on a real Temporal server under load: what waits, what passes, what is retried."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import uuid4

import pytest
from temporalio import workflow
from temporalio.client import Client
from temporalio.common import RetryPolicy
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from contracts.llm_step import (
    LLMStepInput,
    Outcome,
    OutputForm,
    SessionHint,
    SessionState,
    StepPhase,
)
from contracts.name import SESSION_HINT, continue_queue
from inference_service.engine.protocol import EngineRequest
from inference_service.engine.simulated import Fault, SimulatedConfig
from inference_service.scheduler.event import CapacityChanged, SessionEnded
from inference_service.scheduler.ready_cohort import ReadyCohort
from inference_service.scheduler.setting import SchedulerSettings
from store.database import Database
from tests.inference_service.harness import Harness, harness, until
from tests.inference_service.scripted import ScriptedScheduler
from tests.inference_service.serving import Handle, serving, start, terminate, unique_step

CALL = '{"tool": "search", "arguments": {}}'
FORM = OutputForm(tools=("search",), may_answer=True)
TIMEOUT = timedelta(seconds=1)
"""A heartbeat timeout that queueing and prefill outlast."""


async def attempts_and_life_s(handle: Handle) -> tuple[int, float]:
    """Return the running step's attempt, and how long after its start it last gave a sign."""
    described = (await handle.describe()).raw_description.pending_activities
    if not described:
        return 0, 0.0
    (step,) = described
    last, began = step.last_heartbeat_time, step.last_started_time
    return step.attempt, last.ToMicroseconds() / 1e6 - began.ToMicroseconds() / 1e6


@pytest.mark.parametrize("phase", [StepPhase.QUEUED, StepPhase.PREFILL])
async def test_step_that_waits_or_prefills_longer_than_its_heartbeat_timeout_is_alive(
    temporal_client: Client, database: Database, model: str, phase: StepPhase
) -> None:
    """G1: no false timeout, and one submission per step id."""
    config = SimulatedConfig(
        time_scale=0.0, max_num_seqs=1, faults=(Fault("stall", 0), Fault("stall", 1))
    )
    beat = timedelta(seconds=0.2)
    async with (
        harness(database, config=config) as h,
        serving(
            temporal_client, h, model, first_heartbeat=beat, heartbeat=beat, drain=timedelta(0)
        ),
    ):
        h.engine.stall()
        others = []
        if phase is StepPhase.QUEUED:
            others = [await start(temporal_client, model, unique_step()) for _ in range(2)]
            await until(lambda: h.service.dispatcher.counts() == (0, 2))
        step = unique_step()
        handle = await start(temporal_client, model, step, heartbeat_timeout=TIMEOUT)

        async def outlives() -> bool:
            attempt, life_s = await attempts_and_life_s(handle)
            assert attempt <= 1
            return life_s > 2 * TIMEOUT.total_seconds()

        await until(outlives)
        generation = h.service.generation(step.step_id)
        assert generation is not None
        assert generation.phase is phase
        assert len(h.requests) == (2 if phase is StepPhase.QUEUED else 1)
        await terminate([handle, *others])


async def test_continuations_pass_whatever_waits_on_the_start_queue(
    temporal_client: Client, database: Database, model: str
) -> None:
    """New work that does not fit fills the window; what is begun goes on before it."""
    config = SimulatedConfig(time_scale=0.0, num_blocks=64, max_model_len=2_048, max_num_seqs=4)

    def respond(request: EngineRequest, prompt: str) -> str:
        return CALL if request.json_schema else "An answer."

    def scheduler(capacity: CapacityChanged) -> ReadyCohort:
        return ReadyCohort(capacity, SchedulerSettings(max_waiting=4))

    async with (
        harness(database, config=config, respond=respond, scheduler=scheduler) as h,
        serving(temporal_client, h, model),
    ):
        begun = [await begin(temporal_client, h, model, size) for size in (600, 500)]
        h.engine.stall()
        new = [
            await start(temporal_client, model, unique_step(text="x" * 1_400)) for _ in range(12)
        ]
        await until(lambda: sum(h.service.dispatcher.counts()) == h.service.start_window())
        waiting = sum(h.service.dispatcher.counts())
        assert waiting < len(new), "the window is full, the rest waits in Temporal"
        next_steps = [
            step.model_copy(update={"step_id": f"{step.job_id}/branch/1"}) for step in begun
        ]
        going_on = [await start(temporal_client, model, step, is_new=False) for step in next_steps]
        await until(lambda: sum(h.service.dispatcher.counts()) == waiting + len(begun))
        h.engine.resume()
        results = await asyncio.gather(*(handle.result() for handle in going_on))
        assert {result.outcome for result in results} == {Outcome.FINISHED}
        asked = [request.request_id.partition("#")[0] for request in h.requests]
        places = [asked.index(step.step_id) for step in next_steps]
        assert max(places) <= 2 + 1 + len(begun), "the engine's own new step at most goes before"
        ends = await asyncio.gather(*(handle.result() for handle in new))
        assert {result.outcome for result in ends} == {Outcome.FINISHED}


async def begin(client: Client, h: Harness, model: str, size: int) -> LLMStepInput:
    """Take a job's first step, which asks for a tool; return its next step's input."""
    tools = await h.contexts.put_blob(
        [{"name": "search", "description": "Search.", "arguments": {"type": "object",
          "properties": {}, "required": [], "additionalProperties": False}}]
    )  # fmt: skip
    step = unique_step(text="x" * size, toolset=tools, output=FORM)
    result = await (await start(client, model, step)).result()
    assert result.message is not None
    assert result.message.tool_calls
    return step.model_copy(update={"base": result.context, "output": OutputForm()})


async def test_new_session_that_is_refused_is_taken_once_there_is_room(
    temporal_client: Client, database: Database, model: str
) -> None:
    """G15: Temporal retries it when the service said, not when its retry policy does."""
    schedulers: list[ScriptedScheduler] = []

    def scheduler(capacity: CapacityChanged) -> ScriptedScheduler:
        schedulers.append(ScriptedScheduler(capacity))
        schedulers[0].refuses_for_s = 0.5
        return schedulers[0]

    async with (
        harness(database, scheduler=scheduler) as h,
        serving(temporal_client, h, model),
    ):
        handle = await start(temporal_client, model, unique_step())

        async def is_refused() -> bool:
            return (await attempts_and_life_s(handle))[0] > 1

        await until(is_refused)
        schedulers[0].refuses_for_s = None
        result = await handle.result()
    assert (result.outcome, result.epoch) == (Outcome.FINISHED, 1)


async def test_service_whose_engine_makes_no_progress_leaves_and_the_next_one_takes_over(
    temporal_client: Client, database: Database, model: str
) -> None:
    """G14, to its end: the process leaves, and is started again."""
    async with harness(database) as h:
        async with serving(temporal_client, h, model, progress=timedelta(seconds=0.4)):
            h.engine.stall()
            step = unique_step()
            handle = await start(temporal_client, model, step)
            await asyncio.wait_for(h.service.engine_died.wait(), 20)
        async with (
            harness(database, replica="engine-1") as new,
            serving(temporal_client, new, model),
        ):
            result = await handle.result()
    assert (result.replica, result.epoch) == ("engine-1", 2)


@workflow.defn
class OneHint:
    """Gives one hint the way jobs do."""

    @workflow.run
    async def run(self, hint: SessionHint, queue: str) -> None:
        """Return when the service has it."""
        await workflow.execute_activity(
            SESSION_HINT,
            hint,
            task_queue=queue,
            start_to_close_timeout=timedelta(seconds=2),
            retry_policy=RetryPolicy(maximum_attempts=1),
        )


async def test_hint_ends_the_sessions_of_its_job(
    temporal_client: Client, database: Database, model: str
) -> None:
    schedulers: list[ScriptedScheduler] = []

    def scheduler(capacity: CapacityChanged) -> ScriptedScheduler:
        schedulers.append(ScriptedScheduler(capacity))
        return schedulers[0]

    hints = f"hints-{model}"
    async with (
        harness(database, respond=lambda *_: CALL, scheduler=scheduler) as h,
        serving(temporal_client, h, model),
        Worker(
            temporal_client,
            task_queue=hints,
            workflows=[OneHint],
            workflow_runner=UnsandboxedWorkflowRunner(),
        ),
    ):
        step = await begin(temporal_client, h, model, 100)
        assert not schedulers[0].told(SessionEnded)
        await temporal_client.execute_workflow(
            OneHint.run,
            args=[
                SessionHint(job_id=step.job_id, state=SessionState.ENDED),
                continue_queue(model),
            ],
            id=f"one-hint-{uuid4().hex}",
            task_queue=hints,
        )
    assert schedulers[0].told(SessionEnded) == [SessionEnded(step.step_id)]
