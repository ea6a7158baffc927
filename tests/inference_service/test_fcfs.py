"""The first scheduler: its rules, one by one, and its invariants under any sequence of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from inference_service.scheduler.decision import Abort, Decision, Dispatch, Reject
from inference_service.scheduler.event import (
    CapacityChanged,
    EngineLost,
    Event,
    FirstToken,
    Node,
    StepCancelled,
    StepFailed,
    StepFinished,
    StepReady,
)
from inference_service.scheduler.fcfs import FirstComeFirstServed
from inference_service.scheduler.protocol import IllegalEventError

CAPACITY = CapacityChanged(2, 10_000, 1, 1_000, 400)


def ready(
    step_id: str, prompt_tokens: int = 100, *, is_new: bool = True, cached: int = 0
) -> StepReady:
    path = (Node(step_id, prompt_tokens),)
    return StepReady(step_id, f"session-{step_id}", path, 10, is_new, cached_tokens=cached)


def scheduler_with(*steps: StepReady) -> FirstComeFirstServed:
    scheduler = FirstComeFirstServed(CAPACITY)
    for step in steps:
        scheduler.receive(step, 0.0)
    return scheduler


def test_ready_steps_of_one_moment_are_one_cohort() -> None:
    scheduler = scheduler_with(ready("a"), ready("b"))
    assert scheduler.schedule(0.0) == [Dispatch(("a", "b"))]
    assert scheduler.schedule(0.0) == []


def test_engine_holds_its_seats_and_one_more() -> None:
    scheduler = scheduler_with(*(ready(name) for name in "abcde"))
    assert scheduler.schedule(0.0) == [Dispatch(("a", "b", "c"))]
    scheduler.receive(StepFinished("b", Node("b", 1)), 1.0)
    assert scheduler.schedule(1.0) == [Dispatch(("d",))]


def test_uncomputed_prompts_in_the_engine_are_bounded() -> None:
    scheduler = scheduler_with(ready("a", 300), ready("b", 300))
    assert scheduler.schedule(0.0) == [Dispatch(("a",))]
    scheduler.receive(FirstToken("a", 0), 1.0)
    assert scheduler.schedule(1.0) == [Dispatch(("b",))]


def test_what_is_cached_of_a_prompt_does_not_count_as_uncomputed() -> None:
    scheduler = scheduler_with(ready("a", 300, cached=200), ready("b", 300, cached=200))
    assert scheduler.schedule(0.0) == [Dispatch(("a", "b"))]


def test_a_long_prompt_goes_when_the_engine_has_no_other_to_compute() -> None:
    assert scheduler_with(ready("a", 900)).schedule(0.0) == [Dispatch(("a",))]


def test_nothing_overtakes_a_step_that_waits() -> None:
    scheduler = scheduler_with(ready("a", 300), ready("b", 300), ready("c", 10))
    assert scheduler.schedule(0.0) == [Dispatch(("a",))]
    assert [scheduler.place_in_line(name) for name in "abc"] == [None, 0, 1]


def test_what_can_never_fit_is_rejected_even_behind_a_full_line() -> None:
    scheduler = scheduler_with(*(ready(name) for name in "abcd"), ready("huge", 991))
    rejection, dispatch = scheduler.schedule(0.0)
    assert rejection == Reject("huge", "the model's context window", 1_001, 1_000)
    assert dispatch == Dispatch(("a", "b", "c"))


def test_a_waiting_step_is_rejected_when_capacity_shrinks_below_it() -> None:
    scheduler = scheduler_with(*(ready(name, 390) for name in "ab"))
    scheduler.schedule(0.0)
    scheduler.receive(CapacityChanged(2, 300, 1, 1_000, 400), 1.0)
    assert scheduler.schedule(1.0) == [Reject("b", "the KV cache", 400, 300)]


def test_cancelled_in_line_is_gone_without_a_decision() -> None:
    scheduler = scheduler_with(*(ready(name) for name in "abcd"))
    scheduler.schedule(0.0)
    scheduler.receive(StepCancelled("d"), 1.0)
    assert scheduler.schedule(1.0) == []
    assert scheduler.counts() == (0, 3)


def test_cancelled_in_the_engine_keeps_its_seat_until_the_engine_lets_go() -> None:
    scheduler = scheduler_with(*(ready(name) for name in "abcd"))
    scheduler.schedule(0.0)
    scheduler.receive(StepCancelled("a"), 1.0)
    assert scheduler.schedule(1.0) == [Abort("a")]
    scheduler.receive(StepCancelled("a"), 1.5)
    assert scheduler.schedule(1.5) == [], "one abort is enough"
    scheduler.receive(StepFailed("a"), 2.0)
    assert scheduler.schedule(2.0) == [Dispatch(("d",))]


def test_continuations_leave_less_of_the_engine_to_new_sessions() -> None:
    assert scheduler_with().start_window() == 3
    assert scheduler_with(ready("a", is_new=False)).start_window() == 2
    many = scheduler_with(*(ready(str(n), is_new=False) for n in range(9)))
    assert many.start_window() == 1, "new work is never shut out"


@pytest.mark.parametrize(
    "event",
    [
        ready("a"),
        ready("b"),
        FirstToken("b", 0),
        StepFinished("b", Node("b", 1)),
        StepFailed("never seen"),
        StepCancelled("never seen"),
    ],
    ids=repr,
)
def test_an_illegal_event_raises_and_changes_nothing(event: Event) -> None:
    scheduler = scheduler_with(ready("a", 300), ready("b", 300))
    scheduler.schedule(0.0)
    with pytest.raises(IllegalEventError):
        scheduler.receive(event, 1.0)
    assert scheduler.counts() == (1, 1)
    assert scheduler.schedule(0.0) == [], "not even its time was taken over"


def test_time_never_runs_back() -> None:
    scheduler = scheduler_with()
    scheduler.receive(ready("a"), 5.0)
    with pytest.raises(IllegalEventError):
        scheduler.receive(ready("b"), 4.9)


class SchedulerMachine(RuleBasedStateMachine):
    """Any legal sequence of events, with a plain model of where each step should be."""

    steps = Bundle("steps")

    @initialize(seats=st.integers(1, 4), prefill=st.integers(1, 600))
    def start(self, seats: int, prefill: int) -> None:
        self.capacity = CapacityChanged(seats, 2_000, 1, 1_000, prefill)
        self.scheduler = FirstComeFirstServed(self.capacity)
        self.now = 0.0
        self.count = 0
        self.line: list[StepReady] = []
        self.engine: dict[str, StepReady] = {}
        self.computed: set[str] = set()
        self.aborting: set[str] = set()

    @rule(target=steps, sizes=st.lists(st.integers(1, 1_200), min_size=1, max_size=6))
    def steps_become_ready(self, sizes: list[int]) -> object:
        steps = []
        for size in sizes:
            self.count += 1
            steps.append(ready(f"s{self.count}", size, is_new=self.count % 3 == 0))
            self.line.append(steps[-1])
            self.receive(steps[-1])
        return multiple(*(step.step_id for step in steps))

    @rule(step=steps)
    def first_token(self, step: str) -> None:
        if step in self.engine:
            self.computed.add(step)
            self.receive(FirstToken(step, 0))

    @rule(step=consumes(steps), failed=st.booleans())
    def step_ends(self, step: str, failed: bool) -> None:
        if self.engine.pop(step, None):
            self.computed.discard(step)
            self.aborting.discard(step)
            self.receive(StepFailed(step) if failed else StepFinished(step, Node(step, 1)))

    @rule(step=steps)
    def step_is_cancelled(self, step: str) -> None:
        waiting = [s for s in self.line if s.step_id == step]
        if waiting:
            self.line.remove(waiting[0])
            self.receive(StepCancelled(step))
        elif step in self.engine:
            self.receive(StepCancelled(step))

    @rule()
    def engine_is_lost(self) -> None:
        self.engine.clear()
        self.computed.clear()
        self.aborting.clear()
        self.receive(EngineLost())

    @rule(elapsed=st.floats(0, 10))
    def schedule(self, elapsed: float) -> None:
        self.now += elapsed
        for decision in self.scheduler.schedule(self.now):
            self.carry_out(decision)
        assert self.scheduler.schedule(self.now) == [], "one pass decides everything"
        if self.line:
            assert not self.may_go(self.line[0]), "a step that may go never waits"

    def carry_out(self, decision: Decision) -> None:
        match decision:
            case Dispatch(cohort):
                assert cohort
                for step_id in cohort:
                    step = self.line.pop(0)
                    assert step.step_id == step_id, "first come, first served"
                    assert self.may_go(step), "the engine's queue stays shallow"
                    self.engine[step_id] = step
            case Abort(step_id):
                assert step_id in self.engine
                assert step_id not in self.aborting, "an abort is ordered once"
                self.aborting.add(step_id)
            case Reject(step_id, _, size, limit):
                step = next(s for s in self.line if s.step_id == step_id)
                assert size == step.prompt_tokens + step.max_tokens > limit
                self.line.remove(step)

    def may_go(self, step: StepReady) -> bool:
        waiting = [s.prompt_tokens for i, s in self.engine.items() if i not in self.computed]
        shallow = not waiting or sum(waiting) + step.prompt_tokens <= self.capacity.prefill_tokens
        return len(self.engine) <= self.capacity.max_num_seqs and shallow

    def receive(self, event: Event) -> None:
        self.scheduler.receive(event, self.now)

    @invariant()
    def new_work_always_has_a_window(self) -> None:
        if hasattr(self, "scheduler"):
            assert 1 <= self.scheduler.start_window() <= self.capacity.max_num_seqs + 1


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
