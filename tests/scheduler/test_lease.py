"""Leases and touches: what gives way and in which order, when a lease ends, when prewarms stop."""

from __future__ import annotations

from inference_service.scheduler.decision import Prewarm
from inference_service.scheduler.event import (
    FirstToken,
    KVEvicted,
    Node,
    SessionEnded,
    StepFinished,
    TouchDone,
)
from inference_service.scheduler.lease import PATROL
from inference_service.scheduler.setting import SchedulerSettings
from inference_service.scheduler.touch import MIN_PREWARMS
from tests.scheduler.life import Life
from tests.scheduler.step import finish, keep, learn, new_life, new_step, next_step

KEEP = SchedulerSettings(reserve=False, refresh=False, prewarm=False)


def kept(life: Life) -> set[str]:
    """Return the sessions whose KV is kept while their tools are out."""
    return {lease.session for lease in life.scheduler.view(life.now).leases}


def test_session_expected_back_last_gives_way_first() -> None:
    life = new_life(KEEP)
    learn(life, "quick", 1.0)
    learn(life, "slow", 200.0)
    keep(life, new_step("s", 500), tool="slow")
    keep(life, new_step("q", 500), tool="quick")
    life.tell(new_step("hungry", 900))
    life.pass_time(0.5)
    assert kept(life) == {"q"}


def test_later_admitted_gives_way_to_an_earlier_one_and_never_the_other_way() -> None:
    life = new_life(KEEP)
    keep(life, new_step("first", 600), new_step("second", 600))
    life.tell(new_step("busy", 60))  # so that nothing is weighed for an idle engine
    life.tell(next_step(life, "second", 500))
    assert life.scheduler.place_in_line("second/1") == 0
    life.tell(next_step(life, "first", 500))
    assert life.scheduler.place_in_line("first/1") is None
    assert life.scheduler.view(life.now).yielded == 1


def test_lease_gives_way_to_a_new_session_only_when_the_engine_would_idle() -> None:
    life = new_life(KEEP)
    keep(life, new_step("a", 700), tool="hangs")
    life.tell(new_step("busy", 100))
    life.tell(new_step("b", 900))
    assert kept(life) == {"a"}
    finish(life, "busy", "")
    life.pass_time(3_000.0)
    assert kept(life) == set()
    assert life.scheduler.counts() == (0, 1)


def test_lease_of_a_session_that_will_hardly_return_ends() -> None:
    life = new_life(KEEP)
    learn(life, "tool", 1.0, times=100)
    keep(life, new_step("hangs", 500))
    assert kept(life) == {"hangs"}
    life.now += 86_400.0
    life.schedule()
    assert kept(life) == set()
    assert life.scheduler.view(life.now).working_set == 0


def test_lease_of_a_session_of_which_no_more_is_told_ends() -> None:
    life = new_life(KEEP)
    life.tell(new_step("silent", 500))
    life.tell(FirstToken("silent/0", 0))
    life.tell(StepFinished("silent/0", Node("silent/0", 508)))
    assert kept(life) == {"silent"}
    life.now += 86_400.0
    life.schedule()
    assert kept(life) == set()


def test_lease_ends_behind_any_number_of_sessions_that_may_return() -> None:
    life = new_life(KEEP, num_blocks=1_000)
    learn(life, "quick", 1.0, times=100)
    learn(life, "slow", 1_000.0)
    slow = [f"s{number}" for number in range(2 * PATROL)]
    keep(life, *(new_step(name, 30) for name in slow), tool="slow")
    keep(life, new_step("hangs", 30), tool="quick")
    life.now += 900.0
    for _ in range(3):
        life.schedule()
    assert life.scheduler.view(life.now).kept == len(slow)
    life.tell(SessionEnded(slow[0]))
    keep(life, new_step("another", 30), tool="quick")
    life.now += 80.0
    life.tell(next_step(life, slow[1], 5))
    assert life.scheduler.view(life.now).kept == len(slow), "of those that are back too"


def test_session_that_lost_its_lease_goes_on_all_the_same() -> None:
    life = new_life(KEEP)
    keep(life, new_step("hangs", 500))
    life.now += 86_400.0
    life.schedule()
    life.tell(next_step(life, "hangs", 50))
    finish(life, "hangs")
    assert kept(life) == {"hangs"}


def evicted_before_return(*, hits: bool, rounds: int) -> tuple[int, int]:
    """Return (prewarms, hits) of sessions evicted each time before they come back."""
    life = new_life(SchedulerSettings(reserve=False))
    learn(life, "tool", 10.0, times=60)
    for number in range(rounds):
        name = f"p{number}"
        life.tell(new_step(name, 400))
        life.now += 0.4
        finish(life, name)
        life.tell(KVEvicted(name, 0))
        life.pass_time(9.5)
        life.schedule()
        if life.touching:
            life.tell(TouchDone(name, 0))
        life.now += 0.5
        step = next_step(life, name, 5)
        life.tell(step)
        life.now += 0.4
        life.tell(FirstToken(step.step_id, 400 if hits else 0))
        finish(life, name, "")
    prewarms = sum(isinstance(d, Prewarm) for _, _, made in life.log for d in made)
    return prewarms, life.scheduler.view(life.now).prewarm_hits


def test_prewarms_that_are_used_go_on_and_count_as_hits() -> None:
    prewarms, hits = evicted_before_return(hits=True, rounds=3 * MIN_PREWARMS)
    assert prewarms > MIN_PREWARMS
    assert hits == prewarms


def test_prewarms_that_are_not_used_stop() -> None:
    prewarms, hits = evicted_before_return(hits=False, rounds=3 * MIN_PREWARMS)
    assert (prewarms, hits) == (MIN_PREWARMS, 0)


def test_prewarm_asks_for_whole_blocks_and_one_token_more() -> None:
    life = new_life(SchedulerSettings(reserve=False))
    learn(life, "tool", 10.0, times=60)
    keep(life, new_step("a", 392))  # 400 with its answer: 25 whole blocks, the last one is open
    life.tell(KVEvicted("a", 0))
    life.pass_time(9.5)
    orders = [d for _, _, made in life.log for d in made if isinstance(d, Prewarm)]
    assert orders[-1:] == [Prewarm("a", 385)]


def test_touch_of_a_session_that_has_ended_meanwhile_is_no_error() -> None:
    life = new_life(SchedulerSettings(reserve=False))
    keep(life, new_step("kept", 600))
    for name in ("dead", "gone"):
        life.tell(new_step(name, 450))
        finish(life, name, "")
    life.tell(new_step("hungry", 500))
    assert life.touching == "kept"
    life.tell(SessionEnded("kept"))
    life.tell(TouchDone("kept", 592))
    assert life.scheduler.counts() == (0, 1)
