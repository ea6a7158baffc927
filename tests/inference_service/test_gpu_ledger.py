"""The GPU ledger: every second in one place, and in the right one."""

from __future__ import annotations

from dataclasses import astuple
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_service.engine.protocol import EngineStepStats
from inference_service.gpu_ledger import Fate, GPUAccount, GPULedger


def parts_s(account: GPUAccount) -> float:
    total: float = sum(astuple(account)[1:])
    return total


def prefill(tokens: int, duration_s: float) -> EngineStepStats:
    return EngineStepStats(duration_s, tokens, 0, 0)


def decode(requests: int, duration_s: float) -> EngineStepStats:
    return EngineStepStats(duration_s, 0, requests, requests)


def ledger_of_one(
    *, num_prompt: int = 100, num_known: int = 0, num_cached: int = 0, fate: Fate = Fate.KEPT
) -> GPUAccount:
    """Return the account of one request: 1 s idle, 2 s prefill, 3 s decode, 0.5 s between."""
    ledger = GPULedger(0.0)
    ledger.entered("a", num_prompt=num_prompt, num_known=num_known, now=1.0)
    ledger.stepped(prefill(num_prompt - num_cached, 2.0), 3.0)
    ledger.first_token("a", 3.0)
    ledger.cached("a", num_cached)
    ledger.stepped(decode(1, 3.0), 6.5)
    ledger.ended("a", 6.5)
    ledger.settle("a", fate)
    return ledger.account(7.0)


def test_a_kept_step_is_useful_and_the_rest_is_idle_or_gap() -> None:
    assert ledger_of_one() == GPUAccount(
        wall_s=7.0, useful_prefill_s=2.0, useful_decode_s=3.0, gap_s=0.5, idle_s=1.5
    )


def test_what_the_session_had_computed_before_and_was_not_cached_is_recompute() -> None:
    account = ledger_of_one(num_prompt=100, num_known=80, num_cached=20)
    assert account.recompute_s == pytest.approx(2.0 * 60 / 80)
    assert account.useful_prefill_s == pytest.approx(2.0 * 20 / 80)
    assert account.opportunity == pytest.approx((1.5 + 0.5) / 7.0)


def test_what_nobody_has_anything_of_is_waste() -> None:
    account = ledger_of_one(fate=Fate.WASTED)
    assert (account.waste_s, account.useful_prefill_s, account.useful_decode_s) == (5.0, 0.0, 0.0)


def test_a_touch_computes_nothing_new() -> None:
    assert ledger_of_one(fate=Fate.TOUCH).recompute_s == 5.0


def test_an_engine_step_is_shared_by_the_tokens_it_computed() -> None:
    ledger = GPULedger(0.0)
    ledger.entered("old", num_prompt=10, num_known=0, now=0.0)
    ledger.first_token("old", 0.0)
    ledger.entered("new", num_prompt=30, num_known=0, now=0.0)
    ledger.stepped(
        EngineStepStats(4.0, prefill_tokens=30, decode_tokens=10, decode_requests=10), 4.0
    )
    for request in ("old", "new"):
        ledger.ended(request, 4.0)
        ledger.settle(request, Fate.KEPT)
    account = ledger.account(4.0)
    assert (account.useful_prefill_s, account.useful_decode_s) == (3.0, 1.0)


def test_a_preempted_request_computes_its_tokens_again() -> None:
    ledger = GPULedger(0.0)
    ledger.entered("a", num_prompt=10, num_known=0, now=0.0)
    ledger.first_token("a", 0.0)
    ledger.stepped(
        EngineStepStats(2.0, prefill_tokens=0, decode_tokens=100, decode_requests=1), 2.0
    )
    ledger.ended("a", 2.0)
    ledger.settle("a", Fate.KEPT)
    assert ledger.account(2.0).recompute_s == pytest.approx(1.98)


def test_an_idle_engine_with_a_line_is_told_from_one_with_nothing_to_do() -> None:
    ledger = GPULedger(0.0)
    ledger.line(is_ready=True, is_entering=False, now=1.0)
    ledger.line(is_ready=False, is_entering=True, now=3.0)
    ledger.entered("a", num_prompt=1, num_known=0, now=3.5)
    account = ledger.account(3.5)
    assert (account.idle_s, account.idle_ready_s, account.gap_s) == (1.0, 2.0, 0.5)


def test_an_engine_that_runs_ahead_has_no_gaps_between_its_steps() -> None:
    ledger = GPULedger(0.0)
    ledger.entered("a", num_prompt=1, num_known=0, now=1.0)
    ledger.stepped(prefill(1, inf), 3.0)
    ledger.first_token("a", 3.0)
    ledger.stepped(decode(1, inf), 4.0)
    ledger.ended("a", 4.0)
    ledger.settle("a", Fate.KEPT)
    account = ledger.account(4.0)
    assert (account.useful_prefill_s, account.useful_decode_s, account.gap_s) == (2.0, 1.0, 0.0)


def test_an_engine_that_tells_nothing_of_its_steps_computes_while_it_has_requests() -> None:
    ledger = GPULedger(0.0, tells_steps=False)
    ledger.entered("a", num_prompt=1, num_known=0, now=1.0)
    ledger.first_token("a", 3.0)
    ledger.entered("b", num_prompt=1, num_known=0, now=4.0)
    ledger.ended("a", 6.0)
    ledger.ended("b", 6.0)
    ledger.settle("a", Fate.KEPT)
    ledger.settle("b", Fate.KEPT)
    account = ledger.account(6.0)
    assert (account.useful_prefill_s, account.useful_decode_s) == (3.0, 2.0)
    assert (account.idle_s, account.gap_s) == (1.0, 0.0)


class Play:
    """Random lives of requests, each event at a later time."""

    def __init__(self, *, tells_steps: bool) -> None:
        self.now = 0.0
        self.ledger = GPULedger(0.0, tells_steps=tells_steps)
        self.tells_steps = tells_steps
        self.inside: list[str] = []
        self.ended: list[str] = []
        self.number = 0

    def do(self, choice: int, span_s: float) -> None:
        self.now += span_s
        match choice % 7:
            case 0:
                self.number += 1
                self.inside.append(f"r{self.number}")
                self.ledger.entered(
                    self.inside[-1], num_prompt=9, num_known=choice % 9, now=self.now
                )
            case 1 if self.inside:
                self.ledger.first_token(self.inside[choice % len(self.inside)], self.now)
            case 2 if self.inside:
                request = self.inside.pop(choice % len(self.inside))
                self.ledger.ended(request, self.now)
                self.ended.append(request)
            case 3 if self.ended:
                self.ledger.settle(self.ended.pop(), list(Fate)[choice % 3])
            case 4 if self.tells_steps:
                step = EngineStepStats(span_s * (choice % 3), choice % 5, choice % 4, choice % 2)
                self.ledger.stepped(step, self.now)
            case 5 if self.inside:
                self.ledger.cached(self.inside[-1], choice % 10)
            case _:
                self.ledger.line(
                    is_ready=choice % 2 == 0, is_entering=choice % 3 == 0, now=self.now
                )


@given(
    st.lists(st.tuples(st.integers(0, 10_000), st.floats(0.0, 10.0)), max_size=60),
    st.booleans(),
)
def test_the_parts_sum_to_the_wall_time_and_none_is_negative_or_shrinks(
    events: list[tuple[int, float]], tells_steps: bool
) -> None:
    play = Play(tells_steps=tells_steps)
    before = GPUAccount()
    for choice, span_s in events:
        play.do(choice, span_s)
        account = play.ledger.account(play.now)
        assert parts_s(account) == pytest.approx(play.now, abs=1e-6)
        assert min(astuple(account)) >= 0
        settled, earlier = astuple(account)[:-1], astuple(before)[:-1]
        assert all(now >= then for now, then in zip(settled, earlier, strict=True))
        before = account
