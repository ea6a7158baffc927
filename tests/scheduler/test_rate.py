"""What prefill and decode cost, learned from the times at which steps begin and end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_service.scheduler.rate import RateModel


@given(st.floats(1e-5, 1e-2), st.floats(0.001, 0.1), st.floats(0.0, 0.01))
def test_costs_of_a_plain_engine_are_found(token_s: float, base_s: float, each_s: float) -> None:
    rate, now = RateModel(), 100.0
    for number in range(300):
        width = 1 + number % 4
        names = [f"{number}/{n}" for n in range(width)]
        for _ in names:
            rate.entered(now)
        now += 200 * width * token_s
        for name in names:
            rate.first_token(name, 200, now)
        now += 19 * (base_s + each_s * width)
        for name in names:
            rate.left(name, 20, now)
    assert rate.prefill_token_s == pytest.approx(token_s, rel=0.05)
    assert rate.output_tokens == pytest.approx(20, rel=0.01)
    assert rate.decode_base_s == pytest.approx(base_s, rel=0.1)
    assert rate.decode_each_s == pytest.approx(each_s, rel=0.1, abs=0.1 * base_s)
    assert rate.step_s(100) == pytest.approx(rate.prefill_s(100) + rate.decode_s)


CALLS = st.lists(
    st.tuples(st.floats(0, 5), st.sampled_from(["in", "token", "out", "lost"]), st.integers(0, 99)),
    max_size=40,
)


@given(CALLS)
def test_costs_stay_sensible_whatever_steps_do(calls: list[tuple[float, str, int]]) -> None:
    rate, now, number = RateModel(), 0.0, 0
    prefilling: list[str] = []
    decoding: list[str] = []
    for pause_s, what, tokens in calls:
        now += pause_s
        if what == "in":
            number += 1
            prefilling.append(f"s{number}")
            rate.entered(now)
        elif what == "token" and prefilling:
            decoding.append(prefilling.pop(0))
            rate.first_token(decoding[-1], tokens, now)
        elif what == "out" and prefilling + decoding:
            step = (decoding or prefilling).pop(0)
            rate.left(step, tokens, now)
        elif what == "lost":
            prefilling, decoding = [], []
            rate.lost()
    costs = (rate.prefill_token_s, rate.decode_s, rate.output_tokens)
    assert all(cost > 0 for cost in costs)
    assert rate.decode_base_s >= 0 and rate.decode_each_s >= 0


def test_idle_time_costs_nothing() -> None:
    rate = RateModel()
    before = rate.prefill_token_s
    rate.entered(5_000.0)
    rate.first_token("a", 100, 5_000.0)
    assert rate.prefill_token_s < before + 1e-9


def test_decodes_that_had_no_time_to_themselves_tell_nothing() -> None:
    rate, now = RateModel(), 0.1
    for number in range(50):
        rate.entered(now)
        now += 0.1
        rate.first_token(f"s{number}", 10, now)
        rate.entered(now)  # another prompt is computed as long as this one decodes
        now += 1 / 3
        rate.left(f"s{number}", 20, now)
        rate.left("other", 0, now)
        assert (rate.decode_base_s, rate.decode_each_s) == (0.0, 0.0)
