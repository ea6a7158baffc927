"""Workloads are what their cells say."""

from __future__ import annotations

import pytest

from bench.workload import CACHE_BLOCKS, CONTEXTS, OUTPUT_TOKENS, Cell, _plans, make_plans
from bench.world.engine import EngineModel


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("pressure", [2, 4, 10])
def test_sessions_make_the_pressure_and_the_contexts_of_the_cell(
    context: str, pressure: float
) -> None:
    plans = make_plans(Cell(context=context, pressure=pressure), seed=1)
    size = EngineModel().block_size
    shared = plans[0].shared_tokens // size
    blocks = shared + sum(plan.unique_blocks(size) for plan in plans)
    biggest = max(plan.unique_blocks(size) for plan in plans)
    assert pressure * CACHE_BLOCKS <= blocks < pressure * CACHE_BLOCKS + biggest
    low, high = CONTEXTS[context]
    assert all(low <= plan.final_tokens <= high for plan in plans)
    for plan in plans:
        assert 3 <= len(plan.steps) <= 6
        assert all(OUTPUT_TOKENS[0] <= s.output_tokens <= OUTPUT_TOKENS[1] for s in plan.steps)
        assert [bool(step.tool) for step in plan.steps] == [True] * (len(plan.steps) - 1) + [False]


def test_tools_take_the_time_of_their_name() -> None:
    plans = make_plans(Cell(tool="mixed", context="0.5k", pressure=10), seed=1)
    for tool, mean_s in (("0.1", 0.1), ("3", 3.0), ("30", 30.0)):
        gaps = [step.gap_s for plan in plans for step in plan.steps if step.tool == tool]
        assert 0.85 * mean_s < sum(gaps) / len(gaps) < 1.15 * mean_s


def test_a_twentieth_of_the_sessions_hang_where_the_cell_says_so() -> None:
    plans = make_plans(Cell(context="0.5k", pressure=10, never=True), seed=1)
    assert sum(plan.never_ends for plan in plans) == round(0.05 * len(plans))
    assert not any(plan.never_ends for plan in make_plans(Cell(), seed=1))


def test_poisson_arrivals_bring_the_same_sessions_later() -> None:
    closed = make_plans(Cell(), seed=1)
    spread = make_plans(Cell(arrivals="poisson"), seed=1)
    assert [plan.steps for plan in spread] == [plan.steps for plan in closed]
    arrivals = [plan.arrival_s for plan in spread]
    assert arrivals == sorted(arrivals) and arrivals[0] > 0


def test_same_seed_gives_the_same_sessions() -> None:
    cell = Cell(tool="mixed", context="mixed")
    assert make_plans(cell, 1) == make_plans(cell, 1) != make_plans(cell, 2)


def test_equal_cells_have_the_same_sessions() -> None:
    whole, broken = Cell(context="0.5k", pressure=3), Cell(context="0.5k", pressure=3.0)
    assert whole == broken
    first = _plans.__wrapped__(whole, 1, EngineModel())
    assert first == _plans.__wrapped__(broken, 1, EngineModel())
