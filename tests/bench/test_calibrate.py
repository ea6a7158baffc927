"""The fit finds the costs that made the measurements, and the loop runs on any engine."""

from __future__ import annotations

import random
from dataclasses import astuple

import pytest

from bench.calibrate import compared, simulate
from bench.closed_loop import Loop, Outcome
from bench.fit import Measured, Work, errors, fit, predicted_s
from contracts.llm_step import FinishReason
from inference_service.engine.simulation import CostModel, Generation, Simulation

COST = CostModel(0.03, 0.002, 0.003, 0.000_002, 0.000_001)


def some_work(rng: random.Random) -> Work:
    """Return one engine step of a random kind."""
    prefill = [(rng.randint(1, 512), rng.randint(0, 2_000)) for _ in range(rng.randint(0, 2))]
    return Work.step(prefill, [rng.randint(1, 2_000) for _ in range(rng.randint(0, 32))])


def test_costs_that_made_the_measurements_are_found() -> None:
    rng = random.Random(0)
    works = [some_work(rng) for _ in range(60)]
    rows = [Measured("any", work, predicted_s(COST, work)) for work in works]
    assert astuple(fit(rows)) == pytest.approx(astuple(COST), rel=1e-3)
    assert errors(COST, rows)["all"]["worst_error"] < 1e-9


def test_no_cost_is_negative_and_errors_are_relative() -> None:
    rows = [
        Measured("short", Work.step(decode=[10]), 2.0),
        Measured("long", Work.step(decode=[1_000]), 1.0),
    ]
    cost = fit(rows)
    assert min(astuple(cost)) >= 0
    error = errors(CostModel(1.0, 0.0, 0.0, 0.0), rows)
    assert error["short"] == {"median_error": 0.5, "worst_error": 0.5, "bias": -0.5}
    assert error["long"]["bias"] == 0.0
    assert error["all"]["worst_error"] == 0.5


def test_simulated_steps_take_what_the_fit_predicts() -> None:
    engine = Simulation(
        cost=COST, num_blocks=64, block_size=16, max_num_seqs=4, max_num_batched_tokens=100
    )
    prompts = [list(range(number, number + 90)) for number in (0, 1_000, 2_000)]
    for number, prompt in enumerate(prompts):
        engine.add(Generation(prompt, [5] * 3, FinishReason.STOP, 0, number, 0.0))
    expected = [
        Work.step(prefill=[(90, 0), (10, 0)]),
        Work.step(decode=[91], prefill=[(80, 10), (19, 0)]),
        Work.step(decode=[92, 91], prefill=[(71, 19)]),
    ]
    for work in expected:
        step = engine.schedule(0.0)
        assert step is not None
        assert step.duration_s == pytest.approx(predicted_s(COST, work))
        engine.update(step, 0.0)


async def test_loop_takes_as_long_as_its_steps_and_finds_its_prefixes() -> None:
    loop = Loop(sessions=2, steps=2, tool_s=0.2)
    cost = CostModel(step_s=0.001, prefill_token_s=0.000_01, decode_seq_s=0.0, kv_token_s=0.0)
    lengths = {f"{number}/{step}": 8 for number in range(2) for step in range(2)}
    outcome = await simulate(cost, loop, 200, lengths)
    assert outcome.lengths == lengths
    assert 0.2 < outcome.makespan_s < 2.0
    # the second finds the shared opening, both find their whole blocks again
    prompts = [640, 640, 744, 744]
    assert outcome.prefix_hit == pytest.approx((256 + 2 * 640) / sum(prompts))
    assert outcome.preemptions == 0


def test_error_is_simulated_against_real() -> None:
    figures = compared(Outcome(10.0, 0.5, 0, {}), Outcome(9.0, 0.6, 1, {}))
    assert figures["makespan_error"] == pytest.approx(-0.1)
    assert figures["prefix_hit_error"] == pytest.approx(0.1)
