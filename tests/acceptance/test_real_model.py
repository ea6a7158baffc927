"""The whole stack with vLLM and a real model: answers, cancellation, a killed engine."""

from __future__ import annotations

import asyncio
import json

import pytest

from contracts.agent import AgentSpec, Limits, Sampling
from contracts.job import JobStatus, StopReason
from tests.acceptance.conftest import Stage
from tests.acceptance.test_kill import kill_part
from tests.inference_service.harness import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

TALKER = AgentSpec(
    name="talker",
    instructions="You tell long stories.",
    sampling=Sampling(max_tokens=400),
    limits=Limits(max_turns=1),
)

ENDLESS = TALKER.model_copy(update={"sampling": Sampling(max_tokens=1500)})
"""Still talking when it is cancelled, on a fast machine too."""


async def test_cancelling_a_job_frees_the_engine(real_stage: Stage) -> None:
    stage = real_stage
    base = await stage.stats()
    job_id = await stage.jobs.start(ENDLESS, "Tell me about the sea.", model=stage.model)
    await until(lambda: _is_generating(stage), timeout_s=60)
    await stage.jobs.cancel(job_id)
    await until(lambda: _is_idle(stage), timeout_s=60)
    assert (await stage.stats())["kv_cache_usage"] == base["kv_cache_usage"]
    done = await asyncio.to_thread(stage.muster.run, "cancel", job_id, "--wait", "--json")
    assert (await stage.jobs.report(job_id)).status is JobStatus.CANCELLED, done.stdout
    shown = await asyncio.to_thread(stage.muster.run, "show", job_id, "--json")
    assert json.loads(shown.stdout)["status"] == "cancelled"


async def test_a_killed_engine_loses_no_job_and_generates_no_finished_step_again(
    real_stage: Stage,
) -> None:
    stage = real_stage
    inputs = [f"Tell me about number {n}." for n in range(6)]
    job_ids = [await stage.jobs.start(TALKER, text, model=stage.model) for text in inputs]
    await until(lambda: _is_generating(stage), timeout_s=60)
    await kill_part(stage, "inference")
    results = await stage.results(job_ids)
    assert [r.stop_reason for r in results] == [StopReason.ANSWERED] * 6
    assert all(r.answer for r in results)
    assert any(r.usage.lower_bound for r in results), "the killed attempts are accounted for"
    assert list((await stage.accepted(job_ids)).values()) == [1] * 6


async def test_every_history_of_these_jobs_replays(real_stage: Stage) -> None:
    assert await real_stage.replay_all() >= 7


async def _is_generating(stage: Stage) -> bool:
    return (await stage.stats())["engine_running"] > 0


async def _is_idle(stage: Stage) -> bool:
    stats = await stage.stats()
    return stats["engine_running"] == stats["engine_waiting"] == stats["in_engine"] == 0
