"""Touches beside the line: when an idle engine prewarms, and which steps wait for what."""

from __future__ import annotations

from inference_service.scheduler.decision import Dispatch, Prewarm, Refresh
from inference_service.scheduler.event import KVEvicted, Node, SessionIdle, StepReady, TouchDone
from inference_service.scheduler.setting import SchedulerSettings
from tests.scheduler.life import Life
from tests.scheduler.step import dispatched, finish, keep, learn, new_life, new_step, next_step

GAP_S = 10.0
MAX_WAKES = 100


def evicted() -> Life:
    """Return an idle life in which `a` is out for ten seconds and its KV is gone."""
    life = new_life(SchedulerSettings(reserve=False))
    learn(life, "tool", GAP_S, times=60)
    keep(life, new_step("a", 392))  # 25 whole blocks with its answer, the last one open
    life.tell(KVEvicted("a", 0))
    return life


def prewarming() -> Life:
    """Return a life in which `a` is being prewarmed."""
    life = evicted()
    life.pass_time(GAP_S - 0.5)
    assert life.prewarming == "a"
    return life


def test_idle_service_wakes_when_a_prewarm_falls_due() -> None:
    life = evicted()
    left_s, decisions = life.now, life.schedule()
    for _ in range(MAX_WAKES):
        if life.touching:
            break
        wake_s = life.scheduler.next_wake(life.now)
        assert wake_s is not None, "nobody would look again"
        life.now = wake_s
        decisions = life.schedule()
    assert decisions == [Prewarm("a", 385)]
    assert left_s + GAP_S / 2 < life.now < left_s + GAP_S, "shortly before it is expected"


def test_idle_service_with_nothing_evicted_is_not_woken() -> None:
    life = new_life(SchedulerSettings(reserve=False))
    learn(life, "tool", GAP_S)
    keep(life, new_step("a", 392))
    assert life.scheduler.next_wake(life.now) is None


def test_prewarm_holds_back_no_other_step() -> None:
    life = prewarming()
    assert life.tell(new_step("b", 100)) == [Dispatch(("b/0",))]


def test_step_of_a_prewarmed_session_goes_when_its_touch_ends() -> None:
    for cached in (0, -1):
        life = prewarming()
        step = next_step(life, "a", 20)
        assert life.tell(step) == []
        assert life.tell(new_step("b", 100)) == [Dispatch(("b/0",))]
        assert life.tell(TouchDone("a", cached)) == [Dispatch((step.step_id,))]


def test_step_that_needs_a_refresh_waits_for_the_end_of_a_prewarm() -> None:
    life = new_life(SchedulerSettings(reserve=False))
    learn(life, "tool", GAP_S, times=60)
    learn(life, "slow", 500.0)
    keep(life, new_step("kept", 400), tool="slow")
    keep(life, new_step("a", 392))
    life.tell(KVEvicted("a", 0))
    life.tell(new_step("dead", 500))
    finish(life, "dead", "")
    life.pass_time(GAP_S - 0.5)
    assert life.prewarming == "a"
    assert life.tell(new_step("hungry", 600)) == [], "one touch at a time"
    assert life.tell(TouchDone("a", 0)) == [Refresh("kept", 401)]
    life.tell(TouchDone("kept", 400))
    assert dispatched(life)[-1] == "hungry/0"


def test_session_that_is_forgotten_and_comes_back_waits_for_no_touch() -> None:
    life = prewarming()
    life.forget("a")
    life.tell(SessionIdle("a"))
    assert life.tell(new_step("a", 600, is_new=False)) == [Dispatch(("a/0",))]
    life.tell(TouchDone("a", 0))


def test_step_waits_for_no_refresh_that_cannot_help() -> None:
    life = new_life(SchedulerSettings(reserve=False, watermark=1.0), num_blocks=17)
    life.tell(new_step("dead", 104))  # seven whole blocks with its answer
    finish(life, "dead", "")
    keep(life, new_step("kept", 38))  # two
    keep(life, new_step("a", 129))  # eight, which nobody holds while it waits for a person
    life.forget("a")
    life.tell(SessionIdle("a"))
    path = (Node("a/0", 137), Node("a/1", 230))
    back = StepReady("a/1", "a", path, max_tokens=8, is_new=False)  # seven blocks beside its own
    life.tell(back)
    assert life.scheduler.place_in_line("a/1") is None, "touched or not, one held block goes"
