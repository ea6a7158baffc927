"""The scheduler's rules, one at a time: what goes, waits, gives way or is taken back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from inference_service.scheduler.decision import Abort, Dispatch, Refresh, Reject, Shed
from inference_service.scheduler.event import (
    CapacityChanged,
    EngineLost,
    FanOut,
    GroupResolved,
    Node,
    StepCancelled,
    StepFailed,
    StepFinished,
    ToolsStarted,
    TouchDone,
)
from inference_service.scheduler.protocol import IllegalEventError
from inference_service.scheduler.setting import SchedulerSettings
from tests.scheduler.life import Life
from tests.scheduler.snapshot import snapshot
from tests.scheduler.step import (
    BLOCK,
    dispatched,
    finish,
    keep,
    new_life,
    new_step,
    next_step,
)

PATIENT = SchedulerSettings(max_overtaken_s=10.0, reserve=False)


def test_step_goes_at_once_when_a_seat_is_free() -> None:
    life = new_life()
    assert life.tell(new_step("a", 100)) == [Dispatch(("a/0",))]
    assert life.tell(new_step("b", 100)) == [Dispatch(("b/0",))]


def test_engine_gets_one_step_more_than_it_has_seats() -> None:
    life = new_life(max_num_seqs=2)
    for name in "abcd":
        life.tell(new_step(name, 50))
    assert dispatched(life) == ["a/0", "b/0", "c/0"]
    assert life.scheduler.place_in_line("d/0") == 0


def test_engine_queue_stays_shallow_in_uncomputed_tokens() -> None:
    life = new_life(prefill_tokens=200)
    for name in "abc":
        life.tell(new_step(name, 150))
    assert dispatched(life) == ["a/0"]
    finish(life, "a", "")
    assert dispatched(life) == ["a/0", "b/0"]


def test_abort_is_ordered_once_and_only_while_the_step_is_in_the_engine() -> None:
    life = new_life()
    life.tell(new_step("a", 50))
    life.cancel(life.sessions["a"])
    assert life.tell(StepCancelled("a/0")) == [Abort("a/0")]
    assert life.tell(StepCancelled("a/0")) == []
    assert life.tell(StepFailed("a/0")) == []
    with pytest.raises(IllegalEventError):
        life.scheduler.receive(StepCancelled("a/0"), life.now)


@pytest.mark.parametrize("ends", ["finished", "failed", "lost"])
def test_abort_is_withdrawn_when_the_step_ends_before_it_is_ordered(ends: str) -> None:
    life = new_life()
    life.tell(new_step("a", 50))
    life.cancel(life.sessions["a"])
    life.tell(StepCancelled("a/0"), is_last=False)
    if ends == "finished":
        leaf = life.sessions["a"].path[-1]
        life.tell(StepFinished("a/0", leaf), is_last=False)
    else:
        life.tell(StepFailed("a/0") if ends == "failed" else EngineLost(), is_last=False)
    assert life.schedule() == []


def test_rejection_is_withdrawn_when_the_step_is_cancelled_before_it_is_told() -> None:
    life = new_life()
    life.tell(new_step("a", 5_000), is_last=False)
    with pytest.raises(IllegalEventError):
        life.scheduler.receive(new_step("a", 50), life.now)
    life.cancel(life.sessions["a"])
    assert life.tell(StepCancelled("a/0")) == []


def test_step_that_can_never_fit_is_rejected_with_size_and_limit() -> None:
    life = new_life()
    assert life.tell(new_step("a", 1_600)) == [Reject("a/0", "the KV cache", 1_608, 98 * BLOCK)]
    small = new_life(max_model_len=100)
    what = "the model's context window"
    assert small.tell(new_step("a", 95)) == [Reject("a/0", what, 103, 100)]


def test_session_whose_step_is_rejected_holds_nothing() -> None:
    life = new_life()
    keep(life, new_step("a", 1_000))
    life.tell(next_step(life, "a", 1_000))
    view = life.scheduler.view(life.now)
    assert (view.working_set, view.kept, view.acting) == (0, 0, 0)


def test_step_that_shares_what_another_brought_goes_with_it() -> None:
    life = new_life(SchedulerSettings(reserve=False))
    keep(life, new_step("x", 700), new_step("y", 200))
    life.now = 1.0
    life.tell(new_step("a", 600, opening=560), is_last=False)  # 38 blocks: more than are left
    life.tell(next_step(life, "y", 20), is_last=False)
    life.schedule()
    assert life.scheduler.schedule(life.now) == []


def test_idle_engine_takes_a_step_that_fits_however_far_its_session_may_grow() -> None:
    life = new_life()
    life.tell(new_step("a", 1_200, opening=1_100))
    finish(life, "a", "")
    life.tell(new_step("b", 1_300, opening=1_100))  # most of it is cached, and it may grow
    assert dispatched(life) == ["a/0", "b/0"]


def test_leases_that_share_their_blocks_give_way_together() -> None:
    life = new_life(PATIENT)
    keep(life, new_step("a", 900, opening=880), new_step("b", 900, opening=880))
    life.tell(new_step("large", 900))
    life.pass_time(60.0)
    assert "large/0" in dispatched(life)


def test_leases_do_not_give_a_step_the_blocks_that_it_shares_with_them() -> None:
    life = new_life(PATIENT)
    keep(life, new_step("a", 800, opening=640))
    life.tell(new_step("runs", 480))
    life.tell(new_step("b", 1_500, opening=640))  # 40 of its 94 blocks are those of a
    keep(life, new_step("later", 16))
    life.pass_time(60.0)
    touch_all(life)
    assert life.scheduler.place_in_line("b/0") == 0, "a gives way, yet that is not enough"
    finish(life, "runs", "")
    touch_all(life)
    assert "b/0" in dispatched(life)


def test_due_step_gets_room_from_any_number_of_leases() -> None:
    life = new_life(PATIENT, num_blocks=500, max_model_len=8_000)
    keep(life, *(new_step(f"s{number}", 40) for number in range(150)))
    life.tell(new_step("runs", 40))  # so that the engine is never idle
    life.tell(new_step("large", 480 * BLOCK))
    keep(life, new_step("later", 30))
    assert life.scheduler.place_in_line("large/0") == 0
    life.pass_time(9.0)
    assert dispatched(life)[-1] == "later/0"
    life.pass_time(2.0)
    touch_all(life)
    assert dispatched(life)[-1] == "large/0"


def test_due_step_is_not_overtaken_because_the_engine_queue_has_no_room_for_its_prompt() -> None:
    life = new_life(PATIENT, prefill_tokens=300)
    life.tell(new_step("a0", 200))
    life.tell(new_step("large", 500))
    for number in range(1, 12):
        life.tell(new_step(f"a{number}", 100))
        finish(life, f"a{number - 1}", "")
        if "large/0" in dispatched(life):
            break
        life.pass_time(2.0)
    assert "large/0" in dispatched(life)


def test_retried_speculative_step_is_shed_by_its_new_time_only() -> None:
    life = new_life(max_num_seqs=1)
    life.tell(new_step("a", 30))
    life.tell(new_step("b", 30))
    life.tell(new_step("s", 30, is_speculative=True, expires_s=5.0))
    life.cancel(life.sessions["s"])
    life.tell(StepCancelled("s/0"))
    life.tell(new_step("s", 30, is_speculative=True, expires_s=50.0))
    life.pass_time(20.0)
    assert life.scheduler.place_in_line("s/0") == 0
    life.pass_time(40.0)
    assert life.scheduler.place_in_line("s/0") is None


def test_steps_of_a_resolved_group_are_shed() -> None:
    life = new_life(max_num_seqs=1)
    for name in "abcd":
        life.tell(new_step(name, 30, fan_out=FanOut("g", 4)))
    assert life.tell(GroupResolved("g")) == [
        Shed("c/0", "its group is resolved"),
        Shed("d/0", "its group is resolved"),
    ]


def touch_all(life: Life) -> None:
    """Let every touch that is asked for find all that it should keep."""
    while life.touching:
        life.tell(TouchDone(life.touching, life.sessions[life.touching].path[-1].end - 1))


def test_touch_that_fails_keeps_no_step_waiting() -> None:
    life = waiting_for_a_touch()
    for _ in range(10):
        if life.touching is None:
            break
        life.tell(TouchDone(life.touching, -1))
    assert "hungry/0" in dispatched(life)


def waiting_for_a_touch() -> Life:
    """Return a life in which `hungry` waits for a kept session to be touched."""
    life = new_life(SchedulerSettings(reserve=False))
    keep(life, new_step("kept", 600))
    for name in ("dead", "gone"):
        life.tell(new_step(name, 450))
        finish(life, name, "")
    life.tell(new_step("hungry", 500))
    assert life.touching == "kept"
    assert life.scheduler.place_in_line("hungry/0") == 0
    return life


def test_step_goes_once_what_would_be_evicted_has_been_touched() -> None:
    life = waiting_for_a_touch()
    assert life.tell(TouchDone("kept", 592)) == [Dispatch(("hungry/0",))]


def test_looking_at_the_scheduler_changes_nothing() -> None:
    life = new_life()
    keep(life, new_step("a", 100), new_step("b", 100))
    before = snapshot(life.scheduler)
    life.scheduler.view(100.0)
    life.scheduler.place_in_line("x")
    life.scheduler.next_wake(100.0)
    assert snapshot(life.scheduler) == before


def test_session_that_calls_more_tools_is_out_for_one_set_of_them() -> None:
    life = new_life()
    keep(life, new_step("a", 100))
    life.tell(ToolsStarted("a", ("web",)))
    gaps = {gap.tool: gap.out for gap in life.scheduler.view(life.now).gaps}
    assert gaps == {"tool": 0, "web": 1}


def test_smaller_engine_takes_no_more_than_fits_it() -> None:
    life = new_life(PATIENT)
    for name in "abc":
        life.tell(new_step(name, 400))
    life.tell(new_step("large", 800))
    smaller = CapacityChanged(32, 40, BLOCK, 8_000, 8_000)
    decisions = life.tell(smaller)
    assert decisions == [Reject("large/0", "the KV cache", 808, 39 * BLOCK)]
    life.tell(new_step("d", 400))
    assert life.scheduler.place_in_line("d/0") == 0
    for name in "abc":
        finish(life, name, "")
    assert dispatched(life)[-1] == "d/0"
    life.scheduler.check_integrity()


def test_time_that_runs_back_is_refused() -> None:
    life = new_life()
    life.now = 10.0
    life.tell(new_step("a", 50))
    with pytest.raises(IllegalEventError, match="time ran back"):
        life.scheduler.receive(new_step("b", 50), 9.0)
    assert life.scheduler.counts() == (0, 1)


def test_path_whose_ends_fall_is_refused_and_changes_nothing() -> None:
    life = new_life()
    before = snapshot(life.scheduler)
    shrinking = (Node("opening", 50), Node("a/0", 40))
    with pytest.raises(IllegalEventError, match="its path shrinks"):
        life.scheduler.receive(replace(new_step("a", 60), path=shrinking), life.now)
    assert snapshot(life.scheduler) == before


def test_new_work_is_refused_with_a_delay_beyond_the_queue_limit() -> None:
    life = new_life(SchedulerSettings(max_queued_kv=1.0), max_num_seqs=1)
    assert life.scheduler.retry_after_s() is None
    for number in range(6):
        life.tell(new_step(f"s{number}", 500))
    retry_s = life.scheduler.retry_after_s()
    assert retry_s is not None and 1.0 <= retry_s <= 60.0
    finish(life, "s0", "")
    finish(life, "s1", "")
    assert life.scheduler.retry_after_s() is None


@pytest.mark.parametrize("better", [{"priority": 1}, {"deadline_s": 3_600.0}], ids=str)
def test_new_sessions_of_a_better_class_never_hide_a_continuation(better: dict[str, Any]) -> None:
    life = new_life(num_blocks=200)
    keep(life, new_step("c", 640))
    life.tell(new_step("long", 960))
    for number in range(40):
        life.tell(new_step(f"n{number}", 2_400, **better))
    life.tell(next_step(life, "c", 20))
    assert dispatched(life)[-1] == next_step_id("c")


def test_small_leases_without_number_give_way_in_an_idle_engine() -> None:
    life = new_life(SchedulerSettings(reserve=False), num_blocks=1_000, max_model_len=16_000)
    keep(life, *(new_step(f"k{number}", 2 * BLOCK) for number in range(400)), tool="slow")
    decisions = life.tell(new_step("big", 600 * BLOCK))
    for _ in range(400):
        for touch in decisions:
            if isinstance(touch, Refresh):
                decisions = life.tell(TouchDone(touch.session, touch.num_tokens - 1))
    assert "big/0" in dispatched(life)


def test_younger_step_of_a_better_class_hides_no_older_one_that_may_go() -> None:
    life = new_life(SchedulerSettings(reserve=False))
    keep(life, *(new_step(name, 20 * BLOCK) for name in ("old", "middle", "young")))
    life.tell(new_step("long", 25 * BLOCK))
    life.tell(next_step(life, "young", 30 * BLOCK, priority=1))
    life.tell(next_step(life, "old", 32 * BLOCK))
    assert dispatched(life)[-1] == next_step_id("old")


def next_step_id(session: str) -> str:
    """Return the id of a session's second step."""
    return f"{session}/1"
