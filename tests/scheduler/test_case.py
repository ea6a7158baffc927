"""Failure cases of other systems, each held against in virtual time."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest

from bench.policy import ContinuationFirst, SessionCap
from bench.workload import Cell, make_plans
from bench.world.metric import Metrics
from bench.world.plan import NEVER_S, SessionPlan, StepPlan
from bench.world.world import PolicyFactory, World
from inference_service.scheduler.decision import Decision
from inference_service.scheduler.event import FanOut
from inference_service.scheduler.ready_cohort import ReadyCohort
from inference_service.scheduler.setting import SchedulerSettings
from tests.scheduler.life import Life, Place
from tests.scheduler.step import dispatched, finish, keep, new_life, new_step, next_step


def run(plans: list[SessionPlan], policy: PolicyFactory = ReadyCohort) -> Metrics:
    """Run sessions in the world."""
    return World(plans, policy).run()


def finish_all(life: Life, tool: str = "") -> int:
    """Let all that is in the engine finish; returns how many steps that were."""
    running = list(life.at(Place.RUNNING))
    for session in running:
        finish(life, session.id, tool, is_last=False)
    life.schedule()
    return len(running)


def test_g5_five_hundred_ready_together_share_fairly_and_none_is_lost() -> None:
    life = new_life(SchedulerSettings(max_queued_kv=1_000.0), num_blocks=1_000)
    for number in range(500):
        tenant = f"small{number % 5}" if number % 10 == 0 else "big"
        life.tell(new_step(f"s{number}", 60, tenant=tenant), is_last=False)
    life.schedule()
    places = [life.scheduler.place_in_line(f"s{number}/0") for number in range(500)]
    assert sorted(p for p in places if p is not None) == list(range(500 - 33))
    rounds = 0
    while sum(life.scheduler.counts()):
        assert len(life.running()) <= 33
        assert finish_all(life), "something always runs"
        rounds += 1
    order = dispatched(life)
    assert len(order) == len(set(order)) == 500
    assert rounds < 20
    small = [place for place, step in enumerate(order) if int(step[1:-2]) % 10 == 0]
    assert max(small) < 110, "the small tenant has half of the first hundred"


def test_g5_tenants_that_wait_get_shares_by_weight() -> None:
    settings = SchedulerSettings(tenant_weights={"b": 3.0}, max_queued_kv=1_000.0)
    life = new_life(settings, max_num_seqs=4)
    for number in range(200):
        life.tell(new_step(f"{'ab'[number % 2]}{number}", 60, tenant="ab"[number % 2]))
    for _ in range(20):
        finish_all(life)
    went = [step[0] for step in dispatched(life)][5:85]
    assert went.count("b") == pytest.approx(60, abs=3)


def test_g7_three_times_more_sessions_than_fit_run_near_the_best_session_cap() -> None:
    plans = make_plans(Cell(tool="3", context="2k", pressure=3), 1)
    best = min(
        run(plans, partial(SessionCap, limit=limit)).makespan_s for limit in (2, 4, 6, 8, 12, 16)
    )
    muster = run(plans)
    collapsed = run(plans, ContinuationFirst)
    assert muster.makespan_s <= best / 0.9
    assert muster.preemptions <= 0.02 * muster.steps
    assert muster.prefix_hit >= 0.9 * muster.attainable_hit
    assert collapsed.prefix_hit < muster.prefix_hit
    assert muster.idle_with_ready_share < 0.02


def test_g8_one_large_session_among_a_stream_of_small_ones_goes_within_the_bound() -> None:
    settings = SchedulerSettings(max_overtaken_s=30.0)
    rng = random.Random(8)
    large = SessionPlan("large", (StepPlan(7_600, 40),), arrival_s=5.0)
    small = [
        SessionPlan(
            f"s{number}",
            (StepPlan(rng.randint(300, 700), 40, "web", rng.uniform(1, 5)), StepPlan(60, 40)),
            arrival_s=number * 0.9,
        )
        for number in range(200)
    ]
    went: list[float] = []

    class Watched(ReadyCohort):
        def schedule(self, now: float) -> list[Decision]:
            decisions = super().schedule(now)
            if any("large/0" in getattr(d, "cohort", ()) for d in decisions):
                went.append(now)
            return decisions

    metrics = run([large, *small], partial(Watched, settings=settings))
    assert metrics.steps == 401 and not metrics.rejected
    longest_step_s = 15.0
    assert went and went[0] - 5.0 < 30.0 + 2 * longest_step_s


@pytest.mark.parametrize("seed", [1, 2])
def test_g9_tools_that_never_return_take_no_room_for_good(seed: int) -> None:
    with_hanging = make_plans(Cell(tool="3", context="0.5k", pressure=2, never=True), seed)
    assert any(plan.never_ends for plan in with_hanging)
    metrics = run(with_hanging)
    assert not metrics.stalled
    assert metrics.sessions == sum(not plan.never_ends for plan in with_hanging)


def test_g9_session_whose_tool_returned_after_all_is_still_right() -> None:
    hangs = SessionPlan("hangs", (StepPlan(3_000, 30, "web", 90_000.0), StepPlan(50, 20)))
    others = [
        SessionPlan(f"s{number}", (StepPlan(4_000, 30),), arrival_s=600.0 * number)
        for number in range(1, 12)
    ]
    metrics = run([hangs, *others])
    assert not metrics.stalled
    assert metrics.steps == 13
    assert metrics.max_wait_s < 60.0


def test_g10_leases_that_hold_all_the_cache_give_way_to_a_new_request() -> None:
    life = new_life(SchedulerSettings(refresh=False, prewarm=False))
    keep(life, *(new_step(f"s{number}", 230) for number in range(6)), tool="hangs")
    life.tell(new_step("new", 800))
    life.pass_time(60.0)
    assert "new/0" in dispatched(life)


def test_g10_all_sessions_hang_and_new_ones_go_on() -> None:
    hanging = [
        SessionPlan(f"h{number}", (StepPlan(2_000, 30, "web", NEVER_S), StepPlan(9, 9)))
        for number in range(8)
    ]
    late = [SessionPlan(f"s{n}", (StepPlan(4_000, 30),), arrival_s=60.0) for n in range(3)]
    metrics = run([*hanging, *late])
    assert not metrics.stalled
    assert metrics.sessions == 3


def test_g11_cohort_with_a_shared_prefix_counts_it_once() -> None:
    life = new_life(SchedulerSettings(reserve=False))
    group = FanOut("g", 16)
    for number in range(16):  # 16 x 50 blocks would be eight times the cache
        step = new_step(f"s{number}", 800, opening=720, fan_out=group)
        life.tell(step, is_last=False)
    life.schedule()
    assert len(dispatched(life)) == 8  # 45 blocks once, and 5 and a tail for each
    assert life.scheduler.view(0.0).working_set == 45 + 8 * (5 + 1)


def test_g11_shared_prefix_is_computed_once_in_the_world() -> None:
    plans = [
        SessionPlan(f"s{number}", (StepPlan(1_000, 20),), shared_tokens=896) for number in range(16)
    ]
    first = SessionPlan("first", (StepPlan(1_000, 20),), shared_tokens=896)
    late = [SessionPlan(p.name, p.steps, 30.0, p.opening, p.shared_tokens) for p in plans]
    metrics = run([first, *late])
    assert metrics.prefix_hit == metrics.attainable_hit


def test_g12_urgent_step_is_the_first_to_go_when_the_seats_are_full() -> None:
    life = new_life(max_num_seqs=4)
    for number in range(40):
        life.tell(new_step(f"low{number}", 30, priority=5))
    assert len(dispatched(life)) == 5, "seats and one more"
    life.tell(new_step("urgent", 30, priority=1))
    assert life.scheduler.place_in_line("urgent/0") == 0
    finish(life, "low0", "")
    assert dispatched(life)[-1] == "urgent/0"


def test_g12_urgent_new_session_goes_before_continuations_of_others() -> None:
    life = new_life(max_num_seqs=1)
    keep(life, new_step("a", 30, priority=3))
    life.tell(new_step("b", 30, priority=3))
    life.tell(new_step("c", 30, priority=3))
    life.tell(next_step(life, "a", 30, priority=3))
    life.tell(new_step("urgent", 30, priority=1))
    assert life.scheduler.place_in_line("urgent/0") == 0


def test_g14_wake_is_always_ahead_while_something_may_change_by_time() -> None:
    life = new_life(SchedulerSettings(refresh=False, prewarm=False))
    keep(life, *(new_step(f"s{number}", 230) for number in range(6)), tool="hangs")
    life.tell(new_step("new", 800))
    while life.scheduler.counts() == (1, 0):
        wake_s = life.scheduler.next_wake(life.now)
        assert wake_s is not None and life.now < wake_s < math.inf
        life.now = wake_s
        life.schedule()
    assert life.scheduler.counts() == (0, 1)


def test_g15_line_over_its_limit_says_when_to_come_again_and_takes_continuations() -> None:
    life = new_life(SchedulerSettings(max_queued_kv=1.0), max_num_seqs=1)
    keep(life, new_step("old", 60))
    for number in range(8):
        life.tell(new_step(f"s{number}", 400))
    retry_s = life.scheduler.retry_after_s()
    assert retry_s is not None and retry_s >= 1.0
    life.tell(next_step(life, "old", 60))
    assert life.scheduler.place_in_line("old/1") == 0
