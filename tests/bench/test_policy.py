"""The rivals do what their names say."""

from __future__ import annotations

from functools import partial

import pytest

from bench.policy import ContinuationFirst, Plain, RequestCap, SessionCap, is_fixed, named_policy
from bench.workload import Cell, make_plans
from bench.world.world import WithPriority, World
from inference_service.scheduler.decision import Abort, Dispatch, Reject
from inference_service.scheduler.event import (
    CapacityChanged,
    Node,
    SessionEnded,
    StepCancelled,
    StepFailed,
    StepFinished,
    StepReady,
)
from inference_service.scheduler.protocol import IllegalEventError, Scheduler

CAPACITY = CapacityChanged(
    max_num_seqs=2, num_blocks=10, block_size=10, max_model_len=80, prefill_tokens=100
)


def ready(name: str, *, is_new: bool = True, tokens: int = 10) -> StepReady:
    """Return a step; its session is the first letter of its name."""
    return StepReady(name, name[0], (Node(name, tokens),), max_tokens=5, is_new=is_new)


def test_plain_dispatches_everything_at_once() -> None:
    policy = Plain(CAPACITY)
    for name in ("a0", "b0", "c0", "d0"):
        policy.receive(ready(name), 0.0)
    assert policy.schedule(0.0) == [Dispatch(("a0", "b0", "c0", "d0"))]
    assert policy.schedule(0.0) == []
    assert policy.counts() == (0, 4)


def test_plain_rejects_what_can_never_run_and_aborts_what_is_cancelled() -> None:
    policy = Plain(CAPACITY)
    policy.receive(ready("a0", tokens=78), 0.0)
    policy.receive(ready("b0"), 0.0)
    assert policy.schedule(0.0) == [Reject("a0", "the engine", 83, 80), Dispatch(("b0",))]
    policy.receive(StepCancelled("b0"), 1.0)
    assert policy.schedule(1.0) == [Abort("b0")]
    policy.receive(StepFailed("b0"), 2.0)
    assert policy.counts() == (0, 0)


def test_step_that_is_not_in_the_engine_cannot_finish() -> None:
    with pytest.raises(IllegalEventError):
        Plain(CAPACITY).receive(StepFinished("a0", Node("a0", 12)), 0.0)


def test_request_cap_bounds_the_steps_in_the_engine() -> None:
    policy = RequestCap(CAPACITY, limit=2)
    for name in ("a0", "b0", "c0"):
        policy.receive(ready(name), 0.0)
    assert policy.schedule(0.0) == [Dispatch(("a0", "b0"))]
    policy.receive(StepFinished("b0", Node("b0", 12)), 1.0)
    assert policy.schedule(1.0) == [Dispatch(("c0",))]


def test_session_cap_runs_the_admitted_to_their_end() -> None:
    policy = SessionCap(CAPACITY, limit=1)
    policy.receive(ready("a0"), 0.0)
    policy.receive(ready("b0"), 0.0)
    assert policy.schedule(0.0) == [Dispatch(("a0",))]
    policy.receive(StepFinished("a0", Node("a0", 12)), 1.0)
    assert policy.schedule(1.0) == []
    policy.receive(ready("a1", is_new=False), 2.0)
    assert policy.schedule(2.0) == [Dispatch(("a1",))]
    policy.receive(StepFinished("a1", Node("a1", 25)), 3.0)
    policy.receive(SessionEnded("a"), 3.0)
    assert policy.schedule(3.0) == [Dispatch(("b0",))]


def test_continuation_first_says_so_to_the_engine() -> None:
    policy: Scheduler = ContinuationFirst(CAPACITY)
    assert isinstance(policy, WithPriority)
    assert not isinstance(Plain(CAPACITY), WithPriority)
    assert policy.engine_priority(ready("a1", is_new=False)) < policy.engine_priority(ready("b0"))


def test_past_the_cliff_a_good_session_cap_keeps_the_cache_and_plain_does_not() -> None:
    plans = make_plans(Cell(tool="3", context="2k", pressure=4), seed=1)
    plain = World(plans, Plain).run()
    capped = World(plans, partial(SessionCap, limit=6)).run()
    assert capped.prefix_hit > 2 * plain.prefix_hit
    assert capped.jct_mean_s < 0.6 * plain.jct_mean_s
    assert capped.makespan_s < 0.8 * plain.makespan_s


@pytest.mark.parametrize(
    "name", ["plain", "priority", "requests:3", "sessions:3", "muster", "muster-refresh-yielding"]
)
def test_policy_is_made_by_its_name(name: str) -> None:
    assert named_policy(name)(CAPACITY).counts() == (0, 0)
    assert is_fixed(name) == ("muster" not in name)


@pytest.mark.parametrize("name", ["best", "muster-nothing"])
def test_policy_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises((TypeError, ValueError)):
        named_policy(name)
