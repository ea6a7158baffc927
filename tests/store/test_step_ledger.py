"""An LLM step has one owner at a time and one result for ever, whatever races or is repeated."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa

from contracts.llm_step import LLMStepInput, Usage
from store.context import ContextStore
from store.database import Database
from store.step_ledger import (
    AlreadyFinished,
    AttemptOutcome,
    Claimed,
    Orphan,
    StepInputChangedError,
    StepLedger,
)
from tests.store.sample import step_input, step_result, token_run

STEP = step_input()


async def _claim(
    ledger: StepLedger, step: LLMStepInput = STEP, *, token: bytes = b"", digest: str = "d1"
) -> Claimed | AlreadyFinished:
    return await ledger.claim(step=step, digest=digest, replica="engine-0", task_token=token)


async def _own(ledger: StepLedger, step: LLMStepInput = STEP, *, token: bytes = b"") -> Claimed:
    claimed = await _claim(ledger, step, token=token)
    assert isinstance(claimed, Claimed)
    return claimed


async def _commit(
    ledger: StepLedger, epoch: int, usage: Usage, step: LLMStepInput = STEP, answer: str = "hi"
) -> bool:
    result, messages = step_result(step, epoch, usage, answer)
    parent = step.base.head if step.base else None
    return await ledger.commit(result, parent=parent, append=messages, run=token_run(step, [1]))


async def _outcomes(ledger: StepLedger) -> list[str]:
    return [attempt.outcome.value for attempt in await ledger.attempts(STEP.step_id)]


async def test_finished_step_is_answered_from_the_ledger(database: Database) -> None:
    ledger = StepLedger(database)
    assert await _own(ledger) == Claimed(epoch=1, failures=0, past=Usage())
    usage = Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=3)
    assert await _commit(ledger, 1, usage)
    expected, messages = step_result(STEP, 1, usage)
    assert await _claim(ledger) == AlreadyFinished(expected)
    assert expected.context is not None
    assert await ContextStore(database).load(expected.context.head) == messages


async def test_same_id_with_another_input_is_refused_and_changes_nothing(
    database: Database,
) -> None:
    ledger = StepLedger(database)
    await _own(ledger, token=b"a")
    with pytest.raises(StepInputChangedError, match="'job-1/b/1' was asked before") as caught:
        await _claim(ledger, token=b"b", digest="other")
    assert not caught.value.retryable
    assert await _outcomes(ledger) == ["running"]
    assert await _commit(ledger, 1, Usage())
    with pytest.raises(StepInputChangedError):
        await _claim(ledger, digest="other")


async def test_late_result_of_an_older_owner_is_dropped_and_counted_as_waste(
    database: Database,
) -> None:
    ledger = StepLedger(database)
    await _own(ledger, token=b"a")
    second = await _own(ledger, token=b"b")
    assert second.epoch == 2
    late = Usage(prompt_tokens=10, completion_tokens=20)
    assert not await _commit(ledger, 1, late, answer="late")
    assert await _commit(ledger, 2, Usage(prompt_tokens=10, completion_tokens=5), answer="good")

    first, accepted = await ledger.attempts(STEP.step_id)
    assert first.outcome is AttemptOutcome.ABANDONED
    assert first.usage == Usage(prompt_tokens=10, completion_tokens=20, wasted_tokens=20)
    assert accepted.outcome is AttemptOutcome.FINISHED
    assert accepted.usage == Usage(prompt_tokens=10, completion_tokens=5)
    stored = await _claim(ledger)
    assert isinstance(stored, AlreadyFinished)
    assert stored.result.message is not None
    assert stored.result.message.content == "good"
    rows = await database.fetch(sa.text("SELECT body FROM contexts WHERE body LIKE '%late%'"))
    assert rows == []


async def test_late_result_after_the_step_finished_changes_nothing_but_its_own_row(
    database: Database,
) -> None:
    ledger = StepLedger(database)
    await _own(ledger, token=b"a")
    await _own(ledger, token=b"b")
    assert await _commit(ledger, 2, Usage(completion_tokens=5), answer="good")
    assert not await _commit(ledger, 1, Usage(completion_tokens=9), answer="late")
    assert await _outcomes(ledger) == ["abandoned", "finished"]
    assert (await ledger.attempts(STEP.step_id))[0].usage.wasted_tokens == 9


async def test_commit_of_the_same_epoch_twice_is_one_commit(database: Database) -> None:
    ledger = StepLedger(database)
    await _own(ledger)
    results = [await _commit(ledger, 1, Usage(completion_tokens=5)) for _ in range(2)]
    assert results == [True, True]
    assert await _outcomes(ledger) == ["finished"]


async def test_commit_that_nobody_claimed_is_refused(database: Database) -> None:
    assert not await _commit(StepLedger(database), 1, Usage())


async def test_claim_repeated_by_the_same_attempt_is_the_same_claim(database: Database) -> None:
    ledger = StepLedger(database)
    assert await _own(ledger, token=b"a") == await _own(ledger, token=b"a")
    assert await _outcomes(ledger) == ["running"]


async def test_claim_tells_failures_and_tokens_of_earlier_attempts(database: Database) -> None:
    ledger = StepLedger(database)
    one = Usage(prompt_tokens=10, cached_tokens=2, completion_tokens=4)
    await _own(ledger, token=b"1")
    await ledger.close_attempt(STEP.step_id, 1, AttemptOutcome.FAILED, one, "stalled \x00\ud800")
    await _own(ledger, token=b"2")
    await ledger.progress(STEP.step_id, 2, Usage(prompt_tokens=10, completion_tokens=7))
    third = await _own(ledger, token=b"3")
    past = Usage(
        prompt_tokens=20, cached_tokens=2, completion_tokens=11, wasted_tokens=11, lower_bound=True
    )
    assert third == Claimed(epoch=3, failures=1, past=past)

    own = Usage(prompt_tokens=10, cached_tokens=9, completion_tokens=5, wasted_tokens=2)
    assert await _commit(ledger, 3, past + own)
    rows = await ledger.attempts(STEP.step_id)
    assert [row.outcome.value for row in rows] == ["failed", "abandoned", "finished"]
    assert rows[0].error.startswith("stalled")
    assert rows[2].usage == own
    assert sum((row.usage for row in rows), Usage()) == past + own


async def test_closed_attempt_stays_as_it_ended(database: Database) -> None:
    ledger = StepLedger(database)
    await _own(ledger)
    used = Usage(completion_tokens=3)
    await ledger.close_attempt(STEP.step_id, 1, AttemptOutcome.CANCELLED, used)
    await ledger.close_attempt(STEP.step_id, 1, AttemptOutcome.FAILED, Usage(), "later")
    await ledger.progress(STEP.step_id, 1, Usage(completion_tokens=99))
    assert not await _commit(ledger, 1, Usage(completion_tokens=4))
    (row,) = await ledger.attempts(STEP.step_id)
    assert (row.outcome, row.usage.completion_tokens) == (AttemptOutcome.CANCELLED, 3)
    assert not row.usage.lower_bound


async def test_attempt_closed_without_counts_keeps_those_on_record(database: Database) -> None:
    ledger = StepLedger(database)
    await _own(ledger)
    await ledger.progress(STEP.step_id, 1, Usage(prompt_tokens=8, completion_tokens=3))
    await ledger.close_attempt(STEP.step_id, 1, AttemptOutcome.ABANDONED, None, "killed")
    (row,) = await ledger.attempts(STEP.step_id)
    assert row.usage == Usage(
        prompt_tokens=8, completion_tokens=3, wasted_tokens=3, lower_bound=True
    )


async def test_orphans_are_the_running_attempts_with_their_last_task_token(
    database: Database,
) -> None:
    ledger = StepLedger(database)
    others = [step_input(f"job-{number}/b/1") for number in range(2, 5)]
    await _own(ledger, token=b"a")
    await ledger.attach(STEP.step_id, 1, b"joined")
    for step in others:
        await _own(ledger, step, token=step.job_id.encode())
    await _commit(ledger, 1, Usage(), others[0])
    await ledger.close_attempt(others[1].step_id, 1, AttemptOutcome.HANDED_BACK, Usage())
    assert await ledger.abandon_orphans("engine-1") == []
    orphans = await ledger.abandon_orphans("engine-0")
    assert sorted(orphans, key=lambda o: o.step_id) == [
        Orphan(STEP.step_id, 1, b"joined"),
        Orphan(others[2].step_id, 1, b"job-4"),
    ]
    assert await ledger.abandon_orphans("engine-0") == []


async def test_claims_at_once_get_different_epochs_and_one_stays_running(
    database: Database,
) -> None:
    ledger = StepLedger(database)
    for round_ in range(10):
        step = step_input(f"job-1/b/{round_}")
        claims = await asyncio.gather(
            *(_own(ledger, step, token=bytes([number])) for number in range(8))
        )
        assert sorted(claim.epoch for claim in claims) == list(range(1, 9))
        rows = await ledger.attempts(step.step_id)
        assert [row.outcome.value for row in rows] == ["abandoned"] * 7 + ["running"]


async def test_first_claims_at_once_with_different_inputs_leave_one(database: Database) -> None:
    ledger = StepLedger(database)
    answers = await asyncio.gather(
        *(_claim(ledger, token=bytes([n]), digest=f"d{n}") for n in range(8)),
        return_exceptions=True,
    )
    assert sum(isinstance(answer, Claimed) for answer in answers) == 1
    assert sum(isinstance(answer, StepInputChangedError) for answer in answers) == 7
    assert await _outcomes(ledger) == ["running"]


async def test_claim_against_a_late_commit_never_leaves_two_owners(database: Database) -> None:
    ledger = StepLedger(database)
    seen: set[str] = set()
    for round_ in range(60):
        step = step_input(f"job-1/b/{round_}")
        await _own(ledger, step, token=b"a")
        committed, claim = await asyncio.gather(
            _commit(ledger, 1, Usage(completion_tokens=1), step),
            _claim(ledger, step, token=b"b"),
        )
        rows = [row.outcome.value for row in await ledger.attempts(step.step_id)]
        if committed:
            assert isinstance(claim, AlreadyFinished)
            assert rows == ["finished"]
        else:
            assert claim == Claimed(2, 0, claim.past) if isinstance(claim, Claimed) else False
            assert rows == ["abandoned", "running"]
        seen.add(rows[0])
    assert seen  # which of the two wins is up to the server


async def test_commits_at_once_of_steps_that_share_messages_all_succeed(
    database: Database,
) -> None:
    ledger = StepLedger(database)
    steps = [step_input(f"job-{number}/b/1") for number in range(40)]
    await asyncio.gather(*(_own(ledger, step) for step in steps))
    committed = await asyncio.gather(*(_commit(ledger, 1, Usage(), step) for step in steps))
    assert committed == [True] * 40
    rows = await database.fetch(sa.text("SELECT count(*) AS n FROM contexts"))
    assert rows[0].n == 2
