"""What goes wrong around an LLM step, and what the service makes of it: load, stalls, clocks."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from contracts.llm_step import Outcome
from inference_service.engine.protocol import EngineCapacity, EngineRequest
from inference_service.engine.simulated import Fault, SimulatedConfig
from inference_service.failure import (
    DrainingError,
    EngineStalledError,
    NoProgressError,
    OverloadedError,
    to_temporal,
)
from inference_service.generation import Generation
from inference_service.http import http_app
from inference_service.scheduler.event import CapacityChanged
from inference_service.scheduler.ready_cohort import ReadyCohort
from inference_service.scheduler.setting import SchedulerSettings
from inference_service.step import StepSettings
from store.database import Database
from store.step_ledger import AttemptOutcome
from tests.inference_service.harness import Harness, harness, step_input, until
from tests.inference_service.scripted import ScriptedScheduler

LIMIT = timedelta(seconds=0.4)
"""Without progress for this long an engine is given up in these tests."""


async def get(h: Harness, path: str) -> httpx.Response:
    """Ask the service's HTTP surface."""
    size = EngineCapacity(32, 1_024, 32, 1_024, 2_048)
    transport = httpx.ASGITransport(
        http_app(h.service, model="simulated", capacity=size, metrics=CollectorRegistry())
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        return await client.get(path)


async def test_engine_that_makes_no_progress_fails_each_step_once_and_the_health_check(
    database: Database,
) -> None:
    """G14: the engine looks alive, and computes nothing."""
    config = SimulatedConfig(time_scale=0.0, max_num_seqs=1)
    async with harness(database, config=config) as h:
        assert (await get(h, "/health")).status_code == 200
        h.engine.stall()
        steps = [step_input(job_id=f"job-{number}") for number in range(4)]
        generations = [(await h.attach(step))[0] for step in steps]
        await until(lambda: h.service.dispatcher.counts() == (2, 2))
        await h.service.watch_progress(LIMIT)
        ends = await asyncio.gather(*(g.task for g in generations), return_exceptions=True)
        assert Counter(map(type, ends)) == {NoProgressError: 2, DrainingError: 2}
        assert all(isinstance(end, NoProgressError | DrainingError) and end.retryable
                   for end in ends)  # fmt: skip
        assert h.service.engine_died.is_set()
        health = await get(h, "/health")
        assert health.status_code == 503
        assert "no progress" in health.json()["reason"]
        for step in steps:
            (row,) = await h.ledger.attempts(step.step_id)
            assert row.outcome in (AttemptOutcome.ABANDONED, AttemptOutcome.HANDED_BACK)
    async with harness(database) as again:
        results = await asyncio.gather(*map(again.run, steps))
    assert {result.epoch for result in results} == {2}


async def test_engine_that_idles_or_computes_a_long_prompt_makes_progress(
    database: Database,
) -> None:
    config = SimulatedConfig(time_scale=1.0, max_num_batched_tokens=256)
    async with harness(database, config=config) as h:
        watchdog = asyncio.create_task(h.service.watch_progress(LIMIT))
        await asyncio.wait({watchdog}, timeout=2 * LIMIT.total_seconds())
        result = await h.run(step_input(text="Why? " * 4_500))
        assert result.timing.prefill_s > 2 * LIMIT.total_seconds()
        assert not watchdog.done()
        watchdog.cancel()


async def test_stream_that_stops_fails_within_its_gap_and_the_next_attempt_is_new(
    database: Database,
) -> None:
    """G2: a stream stops in the middle, its connection stays open."""
    config = SimulatedConfig(time_scale=0.0, faults=(Fault("stall", request=0, after_tokens=3),))
    settings = StepSettings(token_gap=timedelta(seconds=0.2))
    async with harness(database, config=config, settings=settings) as h:
        began = time.monotonic()
        with pytest.raises(EngineStalledError, match=r"no token for 0\.2 s") as caught:
            await h.run(step_input())
        assert time.monotonic() - began < 5
        assert caught.value.retryable
        assert h.service.dispatcher.counts() == (0, 0)
        assert (await h.run(step_input())).outcome is Outcome.FINISHED


async def test_new_session_that_finds_no_room_is_refused_before_anything_is_done_for_it(
    database: Database,
) -> None:
    """G15: the queue is over its limit."""
    schedulers: list[ScriptedScheduler] = []

    def scheduler(capacity: CapacityChanged) -> ScriptedScheduler:
        schedulers.append(ScriptedScheduler(capacity))
        return schedulers[-1]

    async with harness(database, scheduler=scheduler) as h:
        known = await h.run(step_input())
        schedulers[0].refuses_for_s = 7.5
        new = step_input(job_id="job-new")
        with pytest.raises(OverloadedError, match=r"ask again in 7\.5 s") as caught:
            await h.run(new)
        failure = to_temporal(caught.value)
        assert failure.next_retry_delay == timedelta(seconds=7.5)
        assert not failure.non_retryable
        assert await h.ledger.attempts(new.step_id) == []
        assert h.service.generation(new.step_id) is None
        result = await h.run(step_input(1, base=known.context))
        assert result.outcome is Outcome.FINISHED, "a continuation is never refused for load"


async def test_queue_of_new_sessions_is_bounded_by_their_tokens(database: Database) -> None:
    """G15, with the real scheduler: twice the KV cache may wait."""
    config = SimulatedConfig(time_scale=0.0, num_blocks=64, max_model_len=2_048)

    def scheduler(capacity: CapacityChanged) -> ReadyCohort:
        return ReadyCohort(capacity, SchedulerSettings(max_queued_kv=2.0))

    async with harness(database, config=config, scheduler=scheduler) as h:
        h.engine.stall()
        taken: list[Generation] = []
        waits: list[timedelta] = []
        for number in range(12):
            try:
                step = step_input(job_id=f"job-{number}", text="x" * 1_000)
                taken.append((await h.attach(step))[0])
            except OverloadedError as error:
                waits.append(error.retry_after)
            await until(lambda: bool(taken[-1].ready_s))
        assert waits and all(wait > timedelta(0) for wait in waits)
        assert 4 <= len(taken) <= 7
        h.engine.resume()
        for generation in taken:
            assert (await generation.task).outcome is Outcome.FINISHED


async def test_many_jobs_at_once_are_bounded_fair_and_all_served(database: Database) -> None:
    """G5: 500 jobs become ready together, one tenant has 90% of them."""
    config = SimulatedConfig(time_scale=0.002, max_num_seqs=32)
    steps = [
        step_input(job_id=f"job-{n}", hints={"tenant": "large" if n < 450 else "small"})
        for n in range(500)
    ]
    tenants = {step.step_id: step.hints.tenant for step in steps}
    most = 0

    async with harness(database, config=config) as h:

        def are_done() -> bool:
            nonlocal most
            most = max(most, h.service.dispatcher.counts()[1])
            return all(task.done() for task in running)

        h.engine.stall()
        running = [asyncio.create_task(h.run(step)) for step in steps]
        await until(lambda: sum(h.service.dispatcher.counts()) == 500, 60)
        waiting = [g for id_ in tenants if (g := h.service.generation(id_)) and not g.dispatched_s]
        places = [h.service.heartbeat(generation).place_in_line for generation in waiting]
        assert sorted(p for p in places if p is not None) == list(range(len(waiting)))
        h.engine.resume()
        await until(are_done, 60)
        assert {(await task).outcome for task in running} == {Outcome.FINISHED}
    assert most <= 33
    order = [tenants[request.request_id.partition("#")[0]] for request in h.requests]
    assert len(order) == len(steps), "none is lost, none is asked twice"
    last_small = max(place for place, tenant in enumerate(order) if tenant == "small")
    assert last_small < 180, "one of each in turn, once the first cohort has gone, and some slack"


async def test_wall_clock_that_jumps_back_makes_no_time_negative(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G16: the parts are durations of one monotonic clock, and sum to the whole."""
    real, jump_s = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)

    def respond(request: EngineRequest, prompt: str) -> str:
        nonlocal jump_s
        jump_s -= 3_600.0
        return "word " * 4

    config = SimulatedConfig(time_scale=1.0)
    async with harness(database, config=config, respond=respond) as h:
        began = time.monotonic()
        result = await h.run(step_input())
        took_s = time.monotonic() - began
    assert jump_s < 0
    parts = result.timing.model_dump()
    assert all(seconds >= 0 for seconds in parts.values()), parts
    assert result.timing.prefill_s > 0
    assert result.timing.total_s == pytest.approx(took_s, abs=0.25)
    assert result.timing.total_s <= took_s


async def test_statistics_and_cohorts_tell_what_the_scheduler_did(database: Database) -> None:
    async with harness(database) as h:
        await asyncio.gather(*(h.run(step_input(job_id=f"job-{n}")) for n in range(4)))
        stats: dict[str, Any] = (await get(h, "/stats")).json()
        cohorts: dict[str, Any] = (await get(h, "/cohorts")).json()
    assert stats["steps"] == 4
    assert stats["prompt_tokens"] == sum(len(r.prompt_token_ids) for r in h.requests)
    assert stats["overhead_tokens"] == stats["preemptions"] == stats["ready"] == 0
    assert {"disagreements", "disagreement_tokens", "shed"} <= stats.keys()
    assert sum(len(cohort["steps"]) for cohort in cohorts["last_cohorts"]) == 4
    assert all(cohort["age_s"] >= 0 for cohort in cohorts["last_cohorts"])
    assert cohorts["cache"] == {"block_size": 32, "is_degraded": False}
    assert cohorts["scheduler"]["running"] == 0
