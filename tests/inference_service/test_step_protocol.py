"""The step protocol: one generation per step id, one accepted result, every token accounted for."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from contracts.error import BadInputError, LimitExceededError
from contracts.llm_step import FinishReason, Outcome, OutputForm, StepPhase
from inference_service.engine.protocol import EngineDeadError, EngineRequest
from inference_service.engine.simulated import Fault, SimulatedConfig
from inference_service.failure import (
    DrainingError,
    EngineStalledError,
    StaleAttemptError,
    StepFailedTooOftenError,
    StepFaultError,
)
from inference_service.generation import StopCause
from inference_service.prompt import InvalidOutputError
from inference_service.step import StepSettings
from store.database import Database
from store.step_ledger import AttemptOutcome, Claimed
from tests.inference_service.harness import Harness, harness, step_input, until

SLOW = SimulatedConfig(time_scale=1.0, max_num_seqs=1)
"""Real time: an answer of 400 tokens takes seconds, long enough to interfere with."""


def long_answer(request: EngineRequest, prompt: str) -> str:
    return "word " * 80


async def test_a_step_generates_once_and_its_result_is_kept(database: Database) -> None:
    async with harness(database) as first:
        result = await first.run(step_input())
    assert result.outcome is Outcome.FINISHED
    assert result.message is not None
    assert result.message.content == "An answer."
    assert result.usage.completion_tokens > 0
    assert result.cohort_size == 1
    async with harness(database, replica="engine-1") as second:
        again = await second.run(step_input())
        assert second.requests == [], "nothing is generated twice"
    assert again.message == result.message
    assert (again.epoch, again.replica) == (1, "engine-0")


async def test_a_step_id_never_names_another_input(database: Database) -> None:
    async with harness(database) as h:
        await h.run(step_input(text="One?"))
        with pytest.raises(BadInputError, match="another input"):
            await h.run(step_input(text="Two?"))


async def test_a_second_attempt_joins_the_running_generation(database: Database) -> None:
    async with harness(database) as h:
        (one, _), (two, _) = await h.attach(step_input()), await h.attach(step_input())
        assert one is two
        await one.task
        assert len(h.requests) == 1
        with pytest.raises(BadInputError, match="another input"):
            await h.run(step_input(text="Other?"))


async def test_a_generation_goes_on_until_its_last_attempt_has_left(database: Database) -> None:
    async with harness(database, config=SLOW, respond=long_answer) as h:
        generation, first = await h.attach(step_input())
        _, second = await h.attach(step_input())
        await until(lambda: generation.phase is StepPhase.DECODE)
        h.service.detach(generation, first, StopCause.ABANDONED)
        assert generation.stop_cause is None
        with pytest.raises(StaleAttemptError):
            await h.stop(generation, second, StopCause.ABANDONED)
        (attempt,) = await h.ledger.attempts(generation.step_id)
        assert attempt.outcome is AttemptOutcome.ABANDONED
        assert attempt.usage.wasted_tokens > 0
        assert (await h.engine.stats()).num_running == 0


async def test_an_attempt_that_comes_while_the_old_one_stops_begins_anew(
    database: Database,
) -> None:
    async with harness(database, config=SLOW, respond=long_answer) as h:
        generation, attempt = await h.attach(step_input())
        await until(lambda: generation.phase is StepPhase.DECODE)
        h.service.detach(generation, attempt, StopCause.ABANDONED)
        successor, last = await h.attach(step_input())
        assert successor is not generation
        await until(lambda: successor.phase is StepPhase.DECODE)
        assert successor.epoch == 2
        result = await h.stop(successor, last, StopCause.CANCELLED)
        assert result.usage.wasted_tokens == result.usage.completion_tokens > 0


@pytest.mark.parametrize("phase", list(StepPhase))
async def test_cancelled_at_any_point_returns_usage_and_frees_the_engine(
    database: Database, phase: StepPhase
) -> None:
    async with harness(database, config=SLOW, respond=long_answer) as h:
        blockers = []
        if phase is StepPhase.QUEUED:
            blockers = [await h.attach(step_input(n, job_id="job-b")) for n in range(2)]
            await until(lambda: all(blocker.dispatched.is_set() for blocker, _ in blockers))
        generation, attempt = await h.attach(step_input(text="Why? " * 3_000))
        await until(lambda: bool(generation.ready_s) and generation.phase is phase)
        result = await h.stop(generation, attempt, StopCause.CANCELLED)
        assert result.outcome is Outcome.CANCELLED
        assert result.finish_reason is FinishReason.ABORT
        assert (result.message, result.context) == (None, None)
        assert (result.usage.wasted_tokens > 0) == (phase is StepPhase.DECODE)
        assert (result.timing.decode_s > 0) == (phase is StepPhase.DECODE)
        assert (result.timing.prefill_s > 0) == (phase is not StepPhase.QUEUED)
        (row,) = await h.ledger.attempts(generation.step_id)
        assert row.outcome is AttemptOutcome.CANCELLED
        for blocker, token in blockers:
            await h.stop(blocker, token, StopCause.CANCELLED)
        assert h.service.dispatcher.counts() == (0, 0)
        await until(lambda: _engine_is_empty(h))


async def test_cancelled_before_its_claim_is_back_still_ends_cancelled(
    database: Database,
) -> None:
    async with harness(database) as h:
        generation, attempt = await h.attach(step_input())
        result = await h.stop(generation, attempt, StopCause.CANCELLED)
        assert result.outcome is Outcome.CANCELLED
        assert h.requests == []


async def test_an_engine_that_falls_silent_fails_the_step_and_frees_its_seat(
    database: Database,
) -> None:
    config = SimulatedConfig(time_scale=0.0, faults=(Fault("stall", request=0, after_tokens=2),))
    settings = StepSettings(token_gap=timedelta(seconds=0.2))
    async with harness(database, config=config, settings=settings) as h:
        with pytest.raises(EngineStalledError) as caught:
            await h.run(step_input())
        assert caught.value.retryable
        assert (await h.run(step_input())).epoch == 2
        first, second = await h.ledger.attempts(step_input().step_id)
        assert (first.outcome, second.outcome) == (
            AttemptOutcome.FAILED,
            AttemptOutcome.FINISHED,
        )


async def test_the_third_typed_failure_of_a_step_is_its_last(database: Database) -> None:
    form = OutputForm(json_schema={"type": "object"})
    async with harness(database, respond=lambda *_: "{cut") as h:
        for _ in range(2):
            with pytest.raises(InvalidOutputError):
                await h.run(step_input(output=form))
        with pytest.raises(StepFailedTooOftenError, match="3 times, the limit is 3") as caught:
            await h.run(step_input(output=form))
        assert not caught.value.retryable


async def test_an_invalid_output_is_sampled_again_and_its_tokens_are_waste(
    database: Database,
) -> None:
    answers = iter(["{cut", '{"a": 1}'])
    form = OutputForm(json_schema={"type": "object"})
    async with harness(database, respond=lambda *_: next(answers)) as h:
        result = await h.run(step_input(output=form))
        assert result.message is not None
        assert result.message.content == '{"a": 1}'
        assert 0 < result.usage.wasted_tokens < result.usage.completion_tokens
        cold, warm = h.requests
        assert (cold.temperature, warm.temperature) == (0.0, 0.7)
        assert warm.seed != cold.seed
        assert cold.prompt_token_ids == warm.prompt_token_ids, "a rejected sample never joins"


async def test_a_dead_engine_fails_its_steps_retryably_and_is_told(database: Database) -> None:
    config = SimulatedConfig(time_scale=0.0, faults=(Fault("die", request=0, after_tokens=1),))
    async with harness(database, config=config, respond=long_answer) as h:
        with pytest.raises(EngineDeadError) as caught:
            await h.run(step_input())
        assert caught.value.retryable
        assert h.service.engine_died.is_set()
        with pytest.raises(DrainingError):
            await h.run(step_input(1))
        (row,) = await h.ledger.attempts(step_input().step_id)
        assert row.outcome is AttemptOutcome.ABANDONED


async def test_a_step_larger_than_the_engine_is_refused_with_both_sizes(
    database: Database,
) -> None:
    config = SimulatedConfig(time_scale=0.0, max_model_len=512)
    async with harness(database, config=config) as h:
        with pytest.raises(LimitExceededError, match="the limit is 512 tokens") as caught:
            await h.run(step_input(text="x" * 600))
        assert not caught.value.retryable
        assert h.service.dispatcher.counts() == (0, 0)


async def test_a_result_that_comes_after_a_new_owner_is_dropped(database: Database) -> None:
    """Case G6: it is fenced by the claim's epoch, and its tokens count as waste."""
    async with harness(database, config=SLOW, respond=lambda *_: "word " * 8) as h:
        generation, _ = await h.attach(step_input())
        await until(lambda: generation.phase is StepPhase.DECODE)
        taken = await h.ledger.claim(
            step=step_input(), digest=generation.digest, replica="other", task_token=b"new"
        )
        assert isinstance(taken, Claimed)
        assert taken.epoch == 2
        with pytest.raises(StaleAttemptError, match="epoch 1"):
            await generation.task
        first, second = await h.ledger.attempts(generation.step_id)
        assert (first.outcome, second.outcome) == (
            AttemptOutcome.ABANDONED,
            AttemptOutcome.RUNNING,
        )
        assert first.usage.wasted_tokens > 0


async def test_draining_hands_back_what_waits_and_finishes_what_runs(database: Database) -> None:
    async with harness(database, config=SLOW, respond=lambda *_: "word " * 8) as h:
        running = [await h.attach(step_input(n)) for n in range(2)]
        await until(lambda: all(g.dispatched.is_set() for g, _ in running))
        waiting, _ = await h.attach(step_input(2))
        await until(lambda: bool(waiting.ready_s))
        h.service.drain()
        with pytest.raises(DrainingError):
            await waiting.task
        for generation, _ in running:
            assert (await generation.task).outcome is Outcome.FINISHED
        (row,) = await h.ledger.attempts(waiting.step_id)
        assert row.outcome is AttemptOutcome.HANDED_BACK
        assert h.service.start_window() == 0


async def test_steps_that_are_ready_together_are_one_cohort(database: Database) -> None:
    async with harness(database) as h:
        steps = [step_input(job_id=f"job-{n}") for n in range(8)]
        results = await asyncio.gather(*(h.run(step) for step in steps))
        assert sum(r.cohort_size for r in results) / 8 > 1
        assert h.service.dispatcher.tally.steps == 8
        assert h.service.dispatcher.tally.cohorts < 8


async def test_parts_of_the_time_are_never_negative(database: Database) -> None:
    async with harness(database, config=SLOW, respond=lambda *_: "word " * 4) as h:
        result = await h.run(step_input())
        parts = result.timing.model_dump()
        assert all(value >= 0 for value in parts.values()), parts
        assert parts["prefill_s"] > 0
        assert parts["decode_s"] > 0


async def _engine_is_empty(h: Harness) -> bool:
    stats = await h.engine.stats()
    return stats.num_running == 0 and stats.num_waiting == 0


async def test_error_that_nobody_foresaw_fails_the_step_for_good_in_the_end(
    database: Database,
) -> None:
    def breaks(request: EngineRequest, prompt: str) -> str:
        raise KeyError("unforeseen")

    async with harness(database, respond=breaks) as h:
        for error in (StepFaultError, StepFaultError, StepFailedTooOftenError):
            with pytest.raises(error, match="KeyError: 'unforeseen'"):
                await h.run(step_input())
        attempts = await h.ledger.attempts(step_input().step_id)
    assert [attempt.outcome for attempt in attempts] == [AttemptOutcome.FAILED] * 3
