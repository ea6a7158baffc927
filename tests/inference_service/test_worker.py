"""The service on a real Temporal server: queues, window, cancellation, restarts, drain."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from temporalio import activity
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.worker import Worker

from contracts.llm_step import LLMStepInput, LLMStepResult, Outcome, StepPhase
from contracts.message import content_hash
from contracts.name import LLM_STEP, start_queue
from inference_service.engine.protocol import EngineRequest
from inference_service.engine.simulated import Fault, SimulatedConfig
from inference_service.scheduler.event import CapacityChanged
from inference_service.scheduler.ready_cohort import ReadyCohort
from inference_service.scheduler.setting import SchedulerSettings
from inference_service.worker import fail_orphans
from store.database import Database
from store.step_ledger import AttemptOutcome, StepLedger
from tests.inference_service.harness import Harness, harness, until
from tests.inference_service.serving import serving, start, terminate, unique_step

SLOW = SimulatedConfig(time_scale=1.0, max_num_seqs=1)
STALLED = SimulatedConfig(
    time_scale=0.0,
    max_num_seqs=2,
    faults=tuple(Fault("stall", request=n, after_tokens=1) for n in range(2)),
)
"""Both seats are taken for good."""


def one_waits(capacity: CapacityChanged) -> ReadyCohort:
    """Return a scheduler that leaves all but one of the waiting new steps to Temporal."""
    return ReadyCohort(capacity, SchedulerSettings(max_waiting=1))


def long_answer(request: EngineRequest, prompt: str) -> str:
    return "word " * 80


@pytest.mark.parametrize("is_new", [True, False], ids=["start", "continue"])
async def test_both_queues_are_served(
    temporal_client: Client, database: Database, model: str, is_new: bool
) -> None:
    async with harness(database) as h, serving(temporal_client, h, model):
        result = await (await start(temporal_client, model, unique_step(), is_new=is_new)).result()
    assert result.outcome is Outcome.FINISHED


@pytest.mark.parametrize("cancel_heartbeat", [None, timedelta(seconds=1)], ids=["push", "poll"])
async def test_cancelling_a_job_aborts_its_generation_and_returns_the_usage(
    temporal_client: Client,
    database: Database,
    model: str,
    cancel_heartbeat: timedelta | None,
) -> None:
    async with (
        harness(database, config=SLOW, respond=long_answer) as h,
        serving(temporal_client, h, model, cancel_heartbeat=cancel_heartbeat),
    ):
        step = unique_step()
        handle = await start(temporal_client, model, step)
        await until(lambda: _phase(h, step) is StepPhase.DECODE)
        await handle.cancel()
        result = await handle.result()
        assert result.outcome is Outcome.CANCELLED
        assert result.usage.wasted_tokens > 0
        await until(lambda: _is_idle(h))


async def test_terminating_a_job_aborts_its_generation(
    temporal_client: Client, database: Database, model: str
) -> None:
    async with (
        harness(database, config=SLOW, respond=long_answer) as h,
        serving(temporal_client, h, model, cancel_heartbeat=timedelta(seconds=1)),
    ):
        step = unique_step()
        handle = await start(temporal_client, model, step)
        await until(lambda: _phase(h, step) is StepPhase.DECODE)
        await handle.terminate()
        await until(lambda: h.service.generation(step.step_id) is None)
        await until(lambda: _is_idle(h))
        (row,) = await h.ledger.attempts(step.step_id)
        assert row.outcome in (AttemptOutcome.CANCELLED, AttemptOutcome.ABANDONED)


async def test_every_continuation_reaches_the_scheduler_whatever_waits_to_start(
    temporal_client: Client, database: Database, model: str
) -> None:
    async with (
        harness(database, config=STALLED, scheduler=one_waits) as h,
        serving(temporal_client, h, model, drain=timedelta(0)),
    ):
        new = [await start(temporal_client, model, unique_step()) for _ in range(12)]
        await until(lambda: h.service.dispatcher.counts() == (1, 3))
        steps = [unique_step() for _ in range(5)]
        known = [await start(temporal_client, model, step, is_new=False) for step in steps]
        await until(lambda: h.service.dispatcher.counts() == (6, 3))
        await terminate([*new, *known])


async def test_new_sessions_wait_in_temporal_while_the_window_is_full(
    temporal_client: Client, database: Database, model: str
) -> None:
    async with (
        harness(database, config=STALLED, scheduler=one_waits) as h,
        serving(temporal_client, h, model, drain=timedelta(0)),
    ):
        handles = [await start(temporal_client, model, unique_step()) for _ in range(10)]
        await until(lambda: sum(h.service.dispatcher.counts()) == 4)
        described = [await handle.describe() for handle in handles]
        pending = [a for d in described for a in d.raw_description.pending_activities]
        started = [a for a in pending if a.HasField("last_started_time")]
        assert len(pending) == 10
        assert len(started) == 4, "two seats, one more, one waits; the rest is Temporal's to keep"
        await terminate(handles)


async def test_a_second_attempt_after_a_lost_heartbeat_joins_and_the_first_ends_quietly(
    temporal_client: Client, database: Database, model: str
) -> None:
    """The heartbeat timeout is far below the first heartbeat, so attempts are lost."""
    config = SimulatedConfig(time_scale=1.0, max_num_seqs=4)
    async with (
        harness(database, config=config, respond=lambda *_: "word " * 40) as h,
        serving(temporal_client, h, model),
    ):
        step = unique_step()
        handle = await start(temporal_client, model, step, heartbeat_timeout=timedelta(seconds=1))
        result = await handle.result()
        assert result.outcome is Outcome.FINISHED
        assert result.epoch == 1
        assert len(h.requests) == 1, "one submission per step id"
        history = await handle.fetch_history()
        started = [
            e for e in history.events if e.HasField("activity_task_started_event_attributes")
        ]
        assert started[-1].activity_task_started_event_attributes.attempt > 1


async def test_a_restarted_replica_fails_its_orphans_at_once(
    temporal_client: Client, database: Database, model: str
) -> None:
    step = unique_step()
    ledger = StepLedger(database)
    claimed = asyncio.Event()

    @activity.defn(name=LLM_STEP)
    async def claim_and_vanish(step: LLMStepInput) -> LLMStepResult:
        token = activity.info().task_token
        await ledger.claim(
            step=step, digest=content_hash(step), replica="engine-0", task_token=token
        )
        claimed.set()
        activity.raise_complete_async()

    async with Worker(
        temporal_client,
        task_queue=start_queue(model),
        activities=[claim_and_vanish],
        # The SDK's shutdown can hang on an activity that it cancels while that leaves.
        graceful_shutdown_timeout=timedelta(seconds=5),
    ):
        handle = await start(temporal_client, model, step, heartbeat_timeout=timedelta(minutes=4))
        await claimed.wait()
    assert await fail_orphans(temporal_client, ledger, "engine-0") == 1
    async with harness(database) as h, serving(temporal_client, h, model):
        result = await handle.result()
    assert result.epoch == 2
    assert result.usage.lower_bound
    assert await fail_orphans(temporal_client, ledger, "engine-0") == 0


async def test_a_failure_that_stays_reaches_the_job_with_its_hint_after_one_attempt(
    temporal_client: Client, database: Database, model: str
) -> None:
    config = SimulatedConfig(time_scale=0.0, max_model_len=256)
    async with harness(database, config=config) as h, serving(temporal_client, h, model):
        handle = await start(temporal_client, model, unique_step(text="x" * 500))
        with pytest.raises(WorkflowFailureError) as caught:
            await handle.result()
    assert isinstance(caught.value.cause, ActivityError)
    failure = caught.value.cause.cause
    assert isinstance(failure, ApplicationError)
    assert failure.type == "LimitExceededError"
    assert "the limit is 256 tokens (hint: shorten the input" in failure.message


async def test_draining_finishes_what_generates_and_hands_the_rest_to_another_replica(
    temporal_client: Client, database: Database, model: str
) -> None:
    async with (
        harness(database, config=SLOW, respond=lambda *_: "word " * 10) as old,
        serving(temporal_client, old, model, drain=timedelta(seconds=20)) as stop,
    ):
        steps = [unique_step() for _ in range(4)]
        handles = [await start(temporal_client, model, s, is_new=False) for s in steps]
        await until(lambda: old.service.dispatcher.counts() == (2, 2))
        stop.set()
        async with (
            harness(database, replica="engine-1") as new,
            serving(temporal_client, new, model),
        ):
            results = [await handle.result() for handle in handles]
    assert sorted(r.replica for r in results) == ["engine-0"] * 2 + ["engine-1"] * 2
    for step in steps:
        rows = await old.ledger.attempts(step.step_id)
        assert [r.outcome for r in rows][-1] is AttemptOutcome.FINISHED
        assert len(rows) <= 2
    words = [r.message.content for r in results if r.replica == "engine-0" and r.message]
    assert words == ["word " * 10] * 2, "a result is never cut short"


async def test_what_does_not_finish_within_the_drain_is_handed_back(
    temporal_client: Client, database: Database, model: str
) -> None:
    step = unique_step()
    async with harness(database, config=SLOW, respond=long_answer) as old:
        async with serving(temporal_client, old, model, drain=timedelta(seconds=0.2)):
            handle = await start(temporal_client, model, step)
            await until(lambda: _phase(old, step) is StepPhase.DECODE)
        async with (
            harness(database, replica="engine-1") as new,
            serving(temporal_client, new, model),
        ):
            result = await handle.result()
    assert (result.replica, result.epoch) == ("engine-1", 2)
    first, second = await old.ledger.attempts(step.step_id)
    assert (first.outcome, second.outcome) == (
        AttemptOutcome.HANDED_BACK,
        AttemptOutcome.FINISHED,
    )


def _phase(h: Harness, step: LLMStepInput) -> StepPhase | None:
    generation = h.service.generation(step.step_id)
    return generation.phase if generation else None


async def _is_idle(h: Harness) -> bool:
    stats = await h.engine.stats()
    return stats.num_running == 0 and sum(h.service.dispatcher.counts()) == 0
