"""The closed loop in wall time, over the simulated engine: the same agents as in virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.journal import Journal, Key
from bench.live import LiveLoop
from bench.live_engine import live_engine
from bench.policy import Plain, named_policy
from bench.pressure import Setting, best_cap, medians, run_all
from bench.workload import Cell, make_plans
from bench.world.engine import EngineModel
from bench.world.plan import NEVER_S, SessionPlan, StepPlan
from bench.world.world import PolicyFactory, World
from inference_service.scheduler.decision import Abort, Decision, Refresh
from inference_service.scheduler.event import Event, FirstToken, StepFailed, ToolsStarted, TouchDone

CELL = "0.1 0.5k 1x closed"
SCALE = 0.001
MODEL = EngineModel(num_blocks=200)


async def run(plans: list[SessionPlan], make_policy: PolicyFactory) -> LiveLoop:
    """Run sessions over a simulated engine; returns the loop and what it counted."""
    async with live_engine("simulated", MODEL, time_scale=SCALE) as live:
        loop = LiveLoop(
            plans,
            make_policy,
            live.engine,
            live.capacity,
            vocabulary=live.vocabulary,
            time_scale=SCALE,
        )
        await loop.run()
    return loop


@pytest.mark.parametrize("policy", ["plain", "sessions:4", "muster"])
async def test_every_session_runs_to_its_end(policy: str) -> None:
    plans = make_plans(Cell.named(CELL), seed=1)
    loop = await run(plans, named_policy(policy))
    assert len(loop.tally.jct_s) == len(plans)
    assert loop.tally.steps == sum(len(plan.steps) for plan in plans)


async def test_hits_are_those_of_virtual_time_where_order_leaves_no_choice() -> None:
    plans = make_plans(Cell.named(CELL), seed=1)
    loop = await run(plans, named_policy("sessions:1"))
    metrics = World(plans, named_policy("sessions:1"), MODEL).run()
    assert loop.tally.cached_tokens == loop.tally.attainable_tokens
    assert loop.tally.cached_tokens / loop.tally.prompt_tokens == metrics.prefix_hit


async def test_session_that_never_comes_back_holds_up_nobody() -> None:
    hangs = SessionPlan("a", (StepPlan(50, 5, "tool", NEVER_S), StepPlan(5, 5)))
    loop = await run([hangs, SessionPlan("b", (StepPlan(50, 5),))], Plain)
    assert len(loop.tally.jct_s) == 1


async def test_refresh_and_abort_are_carried_out() -> None:
    told: list[Event] = []

    plans = [
        SessionPlan("a", (StepPlan(70, 5, "tool", 5.0), StepPlan(5, 5))),
        SessionPlan("b", (StepPlan(50, 5),), arrival_s=2.0),
    ]

    class Refreshing(Plain):
        def receive(self, event: Event, now: float) -> None:
            told.append(event)
            super().receive(event, now)
            if isinstance(event, ToolsStarted):
                self._first.append(Refresh("a", 65))
            failed = any(isinstance(before, StepFailed) for before in told)
            if isinstance(event, FirstToken) and event.step_id == "b/0" and not failed:
                self._first.append(Abort("b/0"))

    loop = await run(plans, Refreshing)
    assert [event for event in told if isinstance(event, TouchDone)] == [TouchDone("a", 64)]
    assert [event for event in told if isinstance(event, StepFailed)] == [StepFailed("b/0")]
    assert loop.tally.overhead_tokens == 2
    assert loop.tally.steps == 3


async def test_failure_of_the_policy_fails_the_run() -> None:
    class Broken(Plain):
        def schedule(self, now: float) -> list[Decision]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run([SessionPlan("a", (StepPlan(50, 5),))], Broken)


async def test_pressure_runs_what_is_missing_and_keeps_it(tmp_path: Path) -> None:
    setting = Setting("simulated", MODEL, tmp_path, SCALE)
    keys: list[Key] = [(CELL, p, 1) for p in ("plain", "sessions:3", "muster", "bound")]
    journal = Journal(tmp_path / "runs.jsonl")
    await run_all(journal, keys[:2], setting)
    kept = dict(journal.runs)
    await run_all(journal, keys, setting)
    assert {key: journal.runs[key] for key in kept} == kept
    assert set(journal.runs) == set(keys)
    bound = medians(journal.runs, CELL, "bound")
    assert bound["prefix_hit"] == bound["attainable_hit"]


def test_best_cap_is_found_in_the_simulator() -> None:
    assert best_cap("3 2k 2x closed", "sessions", (1,)) in range(4, 13)
