"""A step that comes again after it failed: its session goes on where it stood in the order."""

from __future__ import annotations

import pytest

from inference_service.scheduler.decision import Reject
from inference_service.scheduler.event import (
    EngineLost,
    Event,
    SessionEnded,
    SessionIdle,
    StepFailed,
    StepReady,
)
from inference_service.scheduler.setting import SchedulerSettings
from tests.scheduler.life import Life
from tests.scheduler.step import finish, keep, new_life, new_step, next_step


def failed(event: Event, *, is_first: bool) -> Life:
    """Return a life in which `a` was admitted before `b`, and a step of `a` comes to nothing."""
    life = new_life(SchedulerSettings(max_queued_kv=0.1))
    life.tell(new_step("a", 100))
    if not is_first:
        finish(life, "a")
    keep(life, new_step("b", 100))
    if not is_first:
        life.tell(next_step(life, "a", 20))
    life.tell(event, is_last=False)
    return life


def in_line(life: Life, *steps: StepReady) -> list[str]:
    """Return the sessions of steps that are told together, in the order in which they wait."""
    for step in steps:
        life.tell(step, is_last=False)
    places = {life.scheduler.place_in_line(step.step_id): step.session for step in steps}
    return [places[place] for place in range(len(steps))]


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("is_lost", [False, True])
def test_retried_step_finds_its_place_in_line_again(is_lost: bool, is_first: bool) -> None:
    event = EngineLost() if is_lost else StepFailed("a/0" if is_first else "a/1")
    life = failed(event, is_first=is_first)
    retry = new_step("a", 150, is_new=is_first)
    assert in_line(life, next_step(life, "b", 20), retry) == ["a", "b"]
    life.schedule()
    assert life.scheduler.view(life.now).admitted == 2


def test_retried_first_step_is_no_new_work_in_the_bounded_queue() -> None:
    life = failed(StepFailed("a/0"), is_first=True)
    assert in_line(life, new_step("c", 20), new_step("a", 1_200)) == ["a", "c"]
    assert life.scheduler.retry_after_s() is None, "only 20 tokens of new work wait"


@pytest.mark.parametrize("over", [SessionEnded("a"), SessionIdle("a")])
def test_session_that_is_over_after_a_failure_has_no_place_any_more(over: Event) -> None:
    life = failed(StepFailed("a/1"), is_first=False)
    life.tell(over)
    again = new_step("a", 150, is_new=False)
    assert in_line(life, next_step(life, "b", 20), again) == ["b", "a"]


def test_retried_step_that_can_never_fit_leaves_no_place_behind() -> None:
    life = failed(StepFailed("a/1"), is_first=False)
    assert isinstance(life.tell(new_step("a", 5_000, is_new=False))[0], Reject)
    again = new_step("a", 150, is_new=False)
    assert in_line(life, next_step(life, "b", 20), again) == ["b", "a"]
