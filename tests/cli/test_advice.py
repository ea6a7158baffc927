"""What a split of time means, in one line, by plain rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.llm_step import StepTiming
from muster.account import PARTS, Split
from muster.advice import BOUNDS, LOST_CACHE, MOSTLY, Bound, bound_shares
from tests.cli.past import JOB_ID, Past, step_result
from tests.cli.past_job import follow_up, job_of, times_of, used
from tests.cli.test_report import TIMING


def test_job_whose_tool_takes_most_of_the_time_is_tool_bound() -> None:
    times = times_of(job_of(TIMING, 9.0))
    assert times.advice.bound is Bound.TOOLS
    assert times.advice.share == pytest.approx(9.0 / times.account.wall_s, abs=0.01)
    assert times.advice.share > 0.8
    assert "more concurrent jobs would fill the GPU; it is not the GPU" in times.advice.text


def test_job_that_waits_for_a_starved_engine_is_gpu_bound() -> None:
    starved = StepTiming(ready_wait_s=8.0, prefill_s=0.5, decode_s=1.0)
    advice = times_of(job_of(starved, 0.5)).advice
    assert advice.bound is Bound.GPU
    assert "waiting for the engine" in advice.text


def test_job_with_slow_host_steps_is_host_bound() -> None:
    slow = StepTiming(host_pre_s=4.0, prefill_s=0.2, decode_s=0.5, host_post_s=1.0)
    advice = times_of(job_of(slow, 0.5)).advice
    assert advice.bound is Bound.HOST
    assert "host_pre most of all" in advice.text
    advice = times_of(job_of(TIMING, 0.1, orchestration_s=5.0)).advice
    assert advice.bound is Bound.HOST
    assert "orchestration most of all" in advice.text


def test_backlog_on_the_task_queue_is_gpu_bound_and_apart_from_the_line() -> None:
    past = Past()
    step = past.step(0.0)
    past.start(step, 6.0)
    past.complete(step, step_result(TIMING), 7.0)
    past.answer("done", 7.0)
    times = times_of(past)
    assert times.account.split.backlog_s == pytest.approx(6.0)
    assert times.account.split.line_s == pytest.approx(TIMING.ready_wait_s)
    assert times.advice.bound is Bound.GPU


def test_no_bound_with_half_of_the_time_is_mixed() -> None:
    mixed = StepTiming(host_pre_s=0.9, decode_s=1.0)
    advice = times_of(job_of(mixed, 2.0)).advice
    assert advice.bound is Bound.MIXED
    assert advice.share < MOSTLY


def test_job_that_has_just_begun_has_no_verdict() -> None:
    advice = times_of(Past(), now_s=0.0).advice
    assert (advice.bound, advice.share) == (Bound.NOTHING, 0.0)


def test_every_part_of_the_time_has_a_name_and_a_bound() -> None:
    assert set(PARTS) == set(BOUNDS) == set(Split.model_fields)


@given(st.builds(Split, **{name: st.floats(0, 1e6) for name in Split.model_fields}))
def test_shares_of_bounds_sum_to_one(split: Split) -> None:
    shares = bound_shares(split)
    assert bool(shares) == (split.total_s > 0)
    if shares:
        assert sum(shares.values()) == pytest.approx(1.0)
        assert list(shares.values()) == sorted(shares.values(), reverse=True)


def test_prompts_that_are_computed_again_are_named_as_the_reason() -> None:
    past = Past()
    reading = StepTiming(prefill_s=1.0)
    follow_up(past, 0.0, None, used(1_000, 0), reading)
    follow_up(past, 1.0, f"{JOB_ID}/0/1", used(1_100, 0), reading)
    times = times_of(past, now_s=2.0)
    tokens = times.account.tokens
    assert (tokens.attainable - tokens.cached) / tokens.prompt >= LOST_CACHE
    assert times.advice.bound is Bound.GPU
    assert "computed again; a larger KV cache" in times.advice.text
