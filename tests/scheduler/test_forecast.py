"""The predicted peak against a plain sum over time, and the lives that are learned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_service.scheduler.forecast import MAX_STEPS, LifeModel, Outlook, PeakModel

OUTLOOKS = st.builds(
    Outlook, st.integers(0, 50), st.floats(0, 9).map(lambda x: round(x, 3)), st.integers(0, 12)
)


def plain_peak(shared: int, outlooks: list[Outlook]) -> float:
    """Return the largest sum over all moments; private blocks go after a session's last step."""
    return max(
        shared + sum(o.private + t * o.growth for o in outlooks if o.steps_left >= t)
        for t in range(MAX_STEPS + 1)
    )


@given(st.integers(0, 90), st.lists(OUTLOOKS, max_size=7), OUTLOOKS, st.sets(st.integers(0, 6)))
def test_peak_is_the_largest_sum(
    shared: int, outlooks: list[Outlook], candidate: Outlook, dropped: set[int]
) -> None:
    model = PeakModel()
    for number, outlook in enumerate(outlooks):
        model.put(f"s{number}", Outlook(1, 1.0, 3))  # replaced at once
        model.put(f"s{number}", outlook)
    for number in dropped:
        model.drop(f"s{number}")
    left = [outlook for number, outlook in enumerate(outlooks) if number not in dropped]
    now = shared + sum(outlook.private for outlook in left)
    assert model.peak(now) == pytest.approx(plain_peak(shared, left))
    assert model.peak(now, candidate) == pytest.approx(plain_peak(shared, [*left, candidate]))


def test_steps_left_are_learned_from_the_sessions_that_end() -> None:
    lives = LifeModel()
    for _ in range(200):
        for steps in range(1, 6):
            lives.step_finished(steps, 10, 100 if steps > 1 else 0)
        lives.session_ended(5)
    assert lives.steps_left(1) == pytest.approx(4, abs=0.3)
    assert lives.steps_left(4) == pytest.approx(1, abs=0.3)
    assert lives.growth_share() == pytest.approx(0.1, abs=0.01)
    assert lives.context_tokens() == 100
    assert lives.new_tokens(4.0) == 6


def test_sessions_that_are_still_alive_have_not_ended() -> None:
    lives = LifeModel()
    for _ in range(50):
        for steps in range(1, 4):
            lives.step_finished(steps, 0, 0)
    assert lives.steps_left(1) > 2.5


def test_life_longer_than_the_table_is_no_error() -> None:
    lives = LifeModel()
    for steps in (1, MAX_STEPS, MAX_STEPS + 50):
        lives.step_finished(steps, 5, 50)
        assert lives.steps_left(steps) > 0
    lives.session_ended(MAX_STEPS + 50)
