"""Kill any process with jobs in flight: every job ends right, nothing is done or paid twice."""

from __future__ import annotations

import pytest

from contracts.job import StopReason
from tests.acceptance.conftest import Stage
from tests.inference_service.harness import until
from tests.stack.command_line import kill

pytestmark = pytest.mark.timeout(600)

JOBS = 8
PARTS = ("agents", "tools", "inference", "temporal", "postgres")


async def undisturbed_answers(stage: Stage, label: str) -> list[str | None]:
    """Return the answers of the same inputs when nothing is killed: they depend on nothing else."""
    results = await stage.results(await stage.start(JOBS, label))
    return [result.answer for result in results]


async def kill_in_flight(stage: Stage, part: str, job_ids: list[str]) -> None:
    """Kill a part while tool calls and LLM steps of these jobs are under way."""
    paid = len(stage.charges(job_ids))
    await until(lambda: len(stage.charges(job_ids)) > paid, timeout_s=60)
    await kill_part(stage, part)


async def kill_part(stage: Stage, part: str) -> None:
    """Kill a part's process and wait until its successor is up."""
    before = stage.muster.part(part)
    kill(before["pid"])

    def is_up_again() -> bool:
        now = stage.muster.part(part)
        return bool(now["restarts"] > before["restarts"] and now["state"] == "up")

    await until(is_up_again, timeout_s=300)


async def check_nothing_lost_or_doubled(stage: Stage, job_ids: list[str], label: str) -> None:
    results = await stage.results(job_ids)
    assert [r.stop_reason for r in results] == [StopReason.ANSWERED] * JOBS
    assert [(r.llm_steps, r.tool_calls) for r in results] == [(4, 3)] * JOBS
    assert [r.answer for r in results] == await undisturbed_answers(stage, label)
    assert len(stage.charges(job_ids)) == 3 * JOBS, "each call charged once"
    accepted = await stage.accepted(job_ids)
    assert list(accepted.values()) == [1] * (4 * JOBS), "each LLM step generated once, for good"


@pytest.mark.parametrize("part", PARTS)
async def test_a_killed_part_loses_nothing_and_doubles_nothing(stage: Stage, part: str) -> None:
    job_ids = await stage.start(JOBS, part)
    await kill_in_flight(stage, part, job_ids)
    await check_nothing_lost_or_doubled(stage, job_ids, part)


async def test_five_kills_in_a_row_do_not_fail_a_job(stage: Stage) -> None:
    job_ids = await stage.start(JOBS, "five")
    for part in ("inference", "tools", "inference", "agents", "inference"):
        await kill_part(stage, part)
    await check_nothing_lost_or_doubled(stage, job_ids, "five")


async def test_every_history_of_these_jobs_replays(stage: Stage) -> None:
    assert await stage.replay_all() >= JOBS
