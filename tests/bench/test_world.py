"""The world in virtual time: what happens when, what it costs, and what the scheduler is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from bench.policy import Plain
from bench.workload import Cell, make_plans
from bench.world.engine import EngineModel
from bench.world.metric import Metrics
from bench.world.plan import NEVER_S, SessionPlan, StepPlan
from bench.world.world import RETRY_S, World
from inference_service.engine.simulation import CostModel
from inference_service.scheduler.decision import Abort, Decision, Prewarm, Refresh, Shed
from inference_service.scheduler.event import (
    CapacityChanged,
    Event,
    FirstToken,
    KVEvicted,
    Node,
    SessionEnded,
    StepFailed,
    StepFinished,
    StepReady,
    ToolsStarted,
    TouchDone,
)

COST = CostModel(step_s=1.0, prefill_token_s=0.01, decode_seq_s=0.1, kv_token_s=0.0)
SMALL = EngineModel(
    num_blocks=8, block_size=10, max_num_seqs=4, max_num_batched_tokens=50, cost=COST
)


class Recorder(Plain):
    """Plain, but it keeps what it is told, and orders what a test wants at an event."""

    def __init__(self, capacity: CapacityChanged) -> None:
        super().__init__(capacity)
        self.told: list[tuple[float, Event]] = []
        self.orders: dict[type[Event], Decision] = {}
        self.wakes: list[float] = []
        self.scheduled: list[float] = []

    def receive(self, event: Event, now: float) -> None:
        self.told.append((now, event))
        super().receive(event, now)
        if type(event) in self.orders:
            self._first.append(self.orders.pop(type(event)))

    def schedule(self, now: float) -> list[Decision]:
        self.scheduled.append(now)
        return super().schedule(now)

    def next_wake(self, now: float) -> float | None:
        return next((wake for wake in self.wakes if wake > now), None)

    def of(self, kind: type[Event]) -> list[tuple[float, Event]]:
        """Return what was told of one kind, and when."""
        return [(now, event) for now, event in self.told if isinstance(event, kind)]


def run(
    *plans: SessionPlan,
    model: EngineModel = SMALL,
    prepare: Callable[[Recorder], None] = lambda _recorder: None,
) -> tuple[Metrics, Recorder]:
    """Run the sessions under a recorder."""
    made: list[Recorder] = []

    def make(capacity: CapacityChanged) -> Recorder:
        made.append(Recorder(capacity))
        prepare(made[0])
        return made[0]

    return World(plans, make, model).run(), made[0]


def session(name: str, *steps: StepPlan, arrival_s: float = 0.0, shared: int = 0) -> SessionPlan:
    """Return a session."""
    steps = tuple(replace(step, max_tokens=1) for step in steps)
    return SessionPlan(name, steps, arrival_s=arrival_s, shared_tokens=shared)


def test_step_takes_the_time_that_the_cost_model_says() -> None:
    metrics, recorder = run(session("a", StepPlan(30, 3), arrival_s=5.0))
    prefill_s, decode_s = 1.0 + 30 * 0.01, 1.1
    assert recorder.of(FirstToken)[0][0] == pytest.approx(5.0 + prefill_s)
    assert metrics.jct_mean_s == pytest.approx(prefill_s + 2 * decode_s)
    assert metrics.makespan_s == pytest.approx(5.0 + prefill_s + 2 * decode_s)
    assert metrics.idle_share == pytest.approx(5.0 / metrics.makespan_s)


def test_step_that_becomes_ready_waits_for_the_engine_step_under_way_only() -> None:
    long = session("a", StepPlan(30, 40))
    _, recorder = run(long, session("b", StepPlan(10, 1), arrival_s=10.0))
    first = {event.step_id: now for now, event in recorder.told if isinstance(event, FirstToken)}
    boundary = 1.3 + 8 * 1.1  # the first end of a decode step after 10
    assert first["b/0"] == pytest.approx(boundary + 1.0 + 0.1 + 10 * 0.01)


def test_session_tells_its_life_in_order() -> None:
    plan = session("a", StepPlan(30, 5, "search", 2.0), StepPlan(7, 3))
    _, recorder = run(plan)
    kinds = [type(event) for _, event in recorder.told]
    assert kinds == [
        StepReady,
        FirstToken,
        StepFinished,
        ToolsStarted,
        StepReady,
        FirstToken,
        StepFinished,
        SessionEnded,
    ]
    (_, first), (now, second) = recorder.of(StepReady)
    assert isinstance(first, StepReady) and isinstance(second, StepReady)
    assert first.is_new and not second.is_new
    assert now == pytest.approx(recorder.of(ToolsStarted)[0][0] + 2.0)
    assert second.path == (Node("a/0", 35), Node("a/1", 42))
    assert second.cached_tokens == 30  # of 34 computed ones, in whole blocks
    assert second.attained_s == pytest.approx(1.3 + 4 * 1.1)
    assert recorder.of(StepFinished)[1][1] == StepFinished("a/1", Node("a/1", 45))
    assert recorder.of(FirstToken)[1][1] == FirstToken("a/1", 30)


def test_sessions_with_one_opening_share_its_blocks() -> None:
    plans = [session(name, StepPlan(30, 2), shared=20) for name in "ab"]
    later = replace(plans[1], arrival_s=50.0)
    metrics, recorder = run(plans[0], later)
    assert recorder.of(FirstToken)[1][1] == FirstToken("b/0", 20)
    assert metrics.prefix_hit == metrics.attainable_hit == 20 / 60
    assert metrics.recompute_share == 0


def test_eviction_of_a_waiting_session_is_told_with_what_is_left() -> None:
    waiting = session("a", StepPlan(30, 11, "slow", 50.0), StepPlan(5, 1))
    metrics, recorder = run(waiting, session("b", StepPlan(55, 2), arrival_s=20.0))
    evicted = [event for _, event in recorder.of(KVEvicted)]
    assert evicted == [KVEvicted("a", 30), KVEvicted("a", 20)]  # one per chunk of b's prompt
    back = recorder.of(StepReady)[2][1]
    assert isinstance(back, StepReady) and back.cached_tokens == 20
    assert metrics.recompute_share == pytest.approx(20 / (30 + 55 + 46 - 20))


def test_refresh_keeps_the_session_and_is_accounted_as_overhead() -> None:
    waiting = session("a", StepPlan(30, 11, "slow", 50.0), StepPlan(5, 1))
    dead = session("b", StepPlan(25, 2), arrival_s=20.0)
    hungry = session("c", StepPlan(30, 2), arrival_s=40.0)
    metrics, recorder = run(waiting, dead, hungry)
    assert recorder.of(KVEvicted)
    assert metrics.touches == 0

    def refresh(recorder: Recorder) -> None:
        recorder.orders[SessionEnded] = Refresh("a", 41)

    metrics, recorder = run(waiting, dead, hungry, prepare=refresh)
    assert [event for _, event in recorder.of(TouchDone)] == [TouchDone("a", 40)]
    assert not recorder.of(KVEvicted)
    assert metrics.touches == 1
    assert metrics.overhead_tokens == 2
    assert metrics.steps == 4


def test_prewarm_computes_an_evicted_session_again() -> None:
    waiting = session("a", StepPlan(30, 11, "slow", 50.0), StepPlan(5, 1))

    def prewarm(recorder: Recorder) -> None:
        recorder.orders[SessionEnded] = Prewarm("a", 41)

    hungry = session("b", StepPlan(55, 2), arrival_s=20.0)
    metrics, recorder = run(waiting, hungry, prepare=prewarm)
    assert [event for _, event in recorder.of(TouchDone)] == [TouchDone("a", 20)]
    back = recorder.of(StepReady)[2][1]
    assert isinstance(back, StepReady) and back.cached_tokens == 40
    assert metrics.overhead_tokens == 22


def test_aborted_step_fails_and_comes_back() -> None:
    def abort(recorder: Recorder) -> None:
        recorder.orders[FirstToken] = Abort("a/0")

    _, recorder = run(session("a", StepPlan(30, 5)), prepare=abort)
    failed_s = recorder.of(StepFailed)[0][0]
    again_s, again = recorder.of(StepReady)[1]
    assert again_s == pytest.approx(failed_s + RETRY_S)
    assert isinstance(again, StepReady) and again.step_id == "a/0"
    assert len(recorder.of(StepFinished)) == 1


def test_step_that_can_never_run_ends_its_session() -> None:
    metrics, recorder = run(session("a", StepPlan(90, 5)), session("b", StepPlan(10, 1)))
    assert metrics.rejected == 1
    assert metrics.steps == 1
    assert (0.0, SessionEnded("a")) in recorder.told


def test_shed_step_ends_its_session() -> None:
    class Shedding(Recorder):
        def schedule(self, now: float) -> list[Decision]:
            if "a/0" in self.line:
                del self.line["a/0"]
                return [Shed("a/0", "stale"), *super().schedule(now)]
            return super().schedule(now)

    metrics = World([session("a", StepPlan(9, 5)), session("b", StepPlan(9, 1))], Shedding).run()
    assert (metrics.shed, metrics.steps) == (1, 1)


def test_scheduler_is_called_when_it_wants_to_wake() -> None:
    def wake(recorder: Recorder) -> None:
        recorder.wakes = [3.25, 4.5]

    _, recorder = run(session("a", StepPlan(30, 40)), prepare=wake)
    assert {3.25, 4.5} <= set(recorder.scheduled)


def test_tool_that_never_returns_is_left_out_and_ends_nothing() -> None:
    hangs = session("a", StepPlan(10, 1, "slow", NEVER_S), StepPlan(1, 1))
    metrics, _ = run(hangs, session("b", StepPlan(10, 5)))
    assert metrics.sessions == 1
    assert metrics.steps == 2
    assert not metrics.stalled


def test_run_in_which_nothing_can_happen_any_more_is_stalled() -> None:
    class Deaf(Plain):
        def schedule(self, now: float) -> list[Decision]:
            return []

    metrics = World([session("a", StepPlan(10, 1))], Deaf, SMALL).run()
    assert metrics.stalled
    assert metrics.makespan_s == float("inf")


def test_context_that_shrinks_goes_on_as_another_session() -> None:
    plan = session("a", StepPlan(30, 5, "t", 1.0), StepPlan(10, 2, keep_tokens=20))
    _, recorder = run(plan)
    back = recorder.of(StepReady)[1][1]
    assert isinstance(back, StepReady)
    assert back.session == "a.1"
    assert back.path == (Node("a.1/kept", 20), Node("a/1", 30))
    assert back.cached_tokens == 20


def test_same_seed_gives_the_same_decisions() -> None:
    cell = Cell(tool="mixed", context="mixed", pressure=2)
    digests = [World(make_plans(cell, seed), Plain).run().digest for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("tool", ["0.1", "30", "mixed"])
@pytest.mark.parametrize("arrivals", ["closed", "poisson"])
def test_all_sessions_end_and_the_cache_stays_consistent(tool: str, arrivals: str) -> None:
    cell = Cell(tool, "mixed", 4, never=True, arrivals=arrivals)
    plans = make_plans(cell, seed=3)
    world = World(plans, Plain)
    metrics = world.run()
    assert metrics.sessions == sum(not plan.never_ends for plan in plans)
    assert metrics.prefix_hit <= metrics.attainable_hit
    world.engine.pool.check_integrity()
