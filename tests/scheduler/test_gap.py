"""Learned gaps against a plain reckoning of Kaplan and Meier, and what a hanging tool does."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_service.scheduler.gap import EDGES, MAX_TOOLS, PRIOR_WEIGHT, GapModel, Gaps

GAPS_S = st.lists(st.floats(0.01, 500), max_size=12)


def kaplan_meier(returned: list[float], out: list[float], edge: float) -> float:
    """Return P(gap > edge) by the products over the gaps seen, in the bins' order; no prior."""

    def upper(gap_s: float) -> float:
        return next((e for e in EDGES if e > gap_s), float("inf"))

    share = 1.0
    for time in sorted({upper(gap) for gap in returned}):
        if time <= edge:
            at_risk = sum(upper(g) >= time for g in [*returned, *out])
            share *= 1 - sum(upper(g) == time for g in returned) / at_risk
    return share


@given(returned=GAPS_S, out=GAPS_S)
def test_survival_is_that_of_kaplan_and_meier(returned: list[float], out: list[float]) -> None:
    many = 100  # so that the prior weighs next to nothing
    gaps = Gaps()
    now = 0.0  # so that a difference is exact
    for number, gap_s in enumerate(returned * many):
        gaps.leave(f"r{number}", now - gap_s)
        gaps.come_back(f"r{number}", now)
    for number, gap_s in enumerate(out * many):
        gaps.leave(f"o{number}", now - gap_s)
    survival = gaps.survival(now)
    assert all(a >= b for a, b in pairwise(survival))
    known = max([*returned, *out], default=0.0)
    for edge, share in zip(EDGES, survival, strict=False):
        if edge < known:
            assert share == pytest.approx(kaplan_meier(returned, out, edge), abs=0.05)


@given(
    gaps_s=GAPS_S,
    waited_s=st.floats(0, 1_000),
    window_s=st.floats(0, 1_000),
    more_s=st.floats(0, 1_000),
)
def test_chance_of_a_return_is_a_chance_and_grows_with_the_window(
    gaps_s: list[float], waited_s: float, window_s: float, more_s: float
) -> None:
    model = learned(gaps_s)
    chance = model.returns_within("tool", waited_s, window_s, 0.0)
    more = model.returns_within("tool", waited_s, window_s + more_s, 0.0)
    assert 0 <= chance <= more + 1e-9 <= 1 + 2e-9
    assert model.remaining_s("tool", waited_s, 0.0) >= 0


def learned(gaps_s: list[float]) -> GapModel:
    """Return a model that has seen these gaps of "tool"."""
    model = GapModel()
    for number, gap_s in enumerate(gaps_s):
        key = model.leave(f"s{number}", ("tool",), -gap_s)
        model.come_back(f"s{number}", key, 0.0)
    return model


def test_expected_return_is_what_was_seen() -> None:
    model = learned([10.0] * 50)
    assert 7 < model.remaining_s("tool", 0.0, 10.0) < 15
    assert model.remaining_s("tool", 8.0, 10.0) < 4
    assert model.returns_within("tool", 8.0, 5.0, 10.0) > 0.9


def test_tool_that_hangs_is_not_taken_for_one_that_returns_soon() -> None:
    model = learned([1.0] * 30)
    for number in range(30):
        model.leave(f"hangs{number}", ("tool",), 0.0)
    now = 600.0
    assert model.returns_within("tool", 0.0, 5.0, now) == pytest.approx(0.5, abs=0.06)
    assert model.remaining_s("tool", 600.0, now) > 60.0


def test_tool_that_hangs_is_expected_later_the_longer_it_hangs() -> None:
    model = learned([1.0] * 30)
    model.leave("hangs", ("tool",), 0.0)
    expected = [model.remaining_s("tool", waited, waited) for waited in (10.0, 100.0, 1_000.0)]
    assert expected == sorted(expected)


def test_tool_out_far_beyond_all_others_will_hardly_return() -> None:
    model = learned([1.0] * 30)
    model.leave("hangs", ("tool",), 0.0)
    assert model.returns_within("tool", 2.0, 300.0, 2.0) > 0.2
    assert model.returns_within("tool", 301.0, 300.0, 301.0) < 0.05


def test_sets_of_tools_are_told_apart_and_their_order_is_not() -> None:
    model = GapModel()
    assert model.leave("a", ("x", "y"), 0.0) == model.leave("b", ("y", "x", "y"), 0.0)
    assert model.leave("c", ("x",), 0.0) != model.leave("d", ("y",), 0.0)


def test_session_that_is_given_up_is_out_no_more() -> None:
    model = GapModel()
    key = model.leave("a", ("x",), 0.0)
    model.give_up("a", key)
    model.come_back("a", key, 5.0)
    (view,) = model.views(9.0)
    assert (view.returned, view.out) == (0, 0)


def test_histograms_are_bounded_in_number() -> None:
    model = GapModel()
    for number in range(MAX_TOOLS + 9):
        model.leave(f"s{number}", (f"tool{number}",), 0.0)
    assert len(model.views(1.0)) == MAX_TOOLS


def test_prior_weighs_as_much_as_it_says() -> None:
    assert Gaps().survival(0.0)[0] == pytest.approx(1.0, abs=0.01)
    gaps = Gaps()
    for number in range(2):
        gaps.leave(str(number), 0.0)
        gaps.come_back(str(number), 0.001)
    assert gaps.survival(1.0)[0] == pytest.approx(PRIOR_WEIGHT / (PRIOR_WEIGHT + 2), abs=0.01)
