"""Any legal sequence of events keeps what is promised; any illegal event changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from inference_service.scheduler.event import (
    CapacityChanged,
    EngineLost,
    Event,
    FanOut,
    FirstToken,
    GroupResolved,
    KVEvicted,
    Node,
    SessionEnded,
    SessionIdle,
    StepCancelled,
    StepFailed,
    StepFinished,
    StepReady,
    ToolsStarted,
    TouchDone,
)
from inference_service.scheduler.protocol import IllegalEventError
from inference_service.scheduler.ready_cohort import ReadyCohort
from inference_service.scheduler.setting import SchedulerSettings
from tests.scheduler.life import Life, Place, Sitting
from tests.scheduler.snapshot import snapshot

OPENINGS = (Node("opening/a", 70), Node("opening/b", 160), Node("opening/c", 6))
TOOLS = ((), ("grep",), ("grep", "web"), ("web",))
LAST = st.sampled_from([True, True, True, False])
"""Whether the shell calls `schedule` after the event; else more happens at the same moment."""
SPANS = st.one_of(st.floats(0, 2), st.floats(0, 40), st.floats(0, 4_000))

CAPACITIES = st.builds(
    CapacityChanged,
    max_num_seqs=st.integers(1, 5),
    num_blocks=st.integers(12, 60),
    block_size=st.just(16),
    max_model_len=st.sampled_from([500, 4_000]),
    prefill_tokens=st.sampled_from([32, 200, 2_000]),
)
SETTINGS = st.builds(
    SchedulerSettings,
    watermark=st.sampled_from([0.9, 0.98, 1.0]),
    max_overtaken_s=st.sampled_from([2.0, 20.0]),
    max_queued_kv=st.sampled_from([0.5, 8.0]),
    max_sessions=st.sampled_from([3, 1_000]),
    lookahead=st.just(64),
    tenant_weights=st.just({"big": 3.0}),
    reserve=st.booleans(),
    refresh=st.booleans(),
    yielding=st.booleans(),
    prewarm=st.booleans(),
)


class ReadyCohortMachine(RuleBasedStateMachine):
    """Tells a scheduler anything that may happen."""

    life: Life

    @initialize(capacity=CAPACITIES, settings=SETTINGS)
    def start(self, capacity: CapacityChanged, settings: SchedulerSettings) -> None:
        self.life = Life(capacity, settings)
        self.number = 0

    # Steps become ready.

    def ready(
        self, data: st.DataObject, session: str, base: tuple[Node, ...], **more: Any
    ) -> StepReady:
        """Return a step that continues a context."""
        self.number += 1
        start = base[-1].end if base else 0
        node = Node(f"step/{self.number}", start + data.draw(SIZES))
        cached = data.draw(st.none() | st.integers(0, node.end))
        deadline = data.draw(st.none() | st.none() | st.floats(-1, 100))
        is_speculative = data.draw(st.sampled_from([False, False, False, True]))
        group = data.draw(st.none() | st.sampled_from("gh"))
        return StepReady(
            step_id=node.id,
            session=session,
            path=(*base, node),
            max_tokens=data.draw(st.sampled_from([1, 20, 60])),
            cached_tokens=cached,
            tenant=data.draw(st.sampled_from(["big", "small"])),
            priority=data.draw(st.sampled_from([1, 3, 3, 3])),
            attained_s=data.draw(st.sampled_from([0.0, 3.0, 50.0])),
            deadline_s=None if deadline is None else self.life.now + deadline,
            fan_out=FanOut(group, 3) if group else None,
            is_speculative=is_speculative,
            expires_s=self.life.now + 30 if is_speculative else None,
            **more,
        )

    @rule(data=st.data(), opening=st.none() | st.sampled_from(OPENINGS), is_last=LAST)
    def new_session(self, data: st.DataObject, opening: Node | None, is_last: bool) -> None:
        base = (opening,) if opening else ()
        is_new = data.draw(st.sampled_from([True, True, True, False]))
        event = self.ready(data, f"session/{self.number}", base, is_new=is_new)
        self.life.tell(event, is_last=is_last)

    @precondition(lambda self: self.life.at(Place.ACTING))
    @rule(data=st.data(), is_last=LAST)
    def continuation(self, data: st.DataObject, is_last: bool) -> None:
        session = self.acting(data)
        event = self.ready(data, session.id, session.path, is_new=False)
        self.life.tell(event, is_last=is_last)

    @precondition(lambda self: self.life.at(Place.ACTING))
    @rule(data=st.data(), width=st.integers(1, 3), is_last=LAST)
    def fan_out_from_a_context(self, data: st.DataObject, width: int, is_last: bool) -> None:
        base = self.acting(data).path
        for left in reversed(range(width)):
            event = self.ready(data, f"session/{self.number}", base, is_new=True)
            self.life.tell(event, is_last=is_last and not left)

    @precondition(lambda self: self.life.gone)
    @rule(data=st.data(), is_last=LAST)
    def session_comes_back_after_it_was_forgotten(self, data: st.DataObject, is_last: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.life.gone)))
        if name not in self.life.sessions:
            is_new = data.draw(st.booleans())
            event = self.ready(data, name, self.life.gone[name], is_new=is_new)
            self.life.tell(event, is_last=is_last)

    # The engine works.

    @precondition(lambda self: self.life.running())
    @rule(data=st.data(), is_last=LAST)
    def first_token(self, data: st.DataObject, is_last: bool) -> None:
        prefilling = [key for key, s in self.life.running().items() if not s.has_token]
        if prefilling:
            step_id = data.draw(st.sampled_from(prefilling))
            tokens = self.life.running()[step_id].path[-1].end
            cached = data.draw(st.integers(0, tokens - 1))
            self.life.tell(FirstToken(step_id, cached), is_last=is_last)

    @precondition(lambda self: self.life.running())
    @rule(data=st.data(), end=st.sampled_from([None, "ended", "idle", *TOOLS]), is_last=LAST)
    def step_finishes(self, data: st.DataObject, end: object, is_last: bool) -> None:
        step_id = data.draw(st.sampled_from(sorted(self.life.running())))
        session = self.life.running()[step_id]
        leaf = session.path[-1]
        assert session.step
        output = data.draw(st.integers(0, session.step.max_tokens))
        finished = StepFinished(step_id, Node(leaf.id, leaf.end + output))
        self.life.tell(finished, is_last=is_last and end is None)
        self.leave(session, end, is_last=is_last)

    def leave(self, session: Sitting, end: object, *, is_last: bool) -> None:
        """Tell what a session does after its step."""
        match end:
            case tuple():
                self.away(session, end, is_last=is_last)
            case "ended":
                self.life.tell(SessionEnded(session.id), is_last=is_last)
            case "idle":
                self.life.forget(session.id)
                self.life.tell(SessionIdle(session.id), is_last=is_last)

    def away(self, session: Sitting, tools: tuple[str, ...], *, is_last: bool) -> None:
        """Tell that tools have started; who was heard of least recently may be forgotten."""
        acting = self.life.at(Place.ACTING)
        self.life.tell(ToolsStarted(session.id, tools), is_last=False)
        if len(acting) > self.life.settings.max_sessions:
            self.life.forget_longest_away()
        if is_last:
            self.life.schedule()

    @precondition(lambda self: self.life.running())
    @rule(data=st.data(), is_last=LAST)
    def step_fails(self, data: st.DataObject, is_last: bool) -> None:
        step_id = data.draw(st.sampled_from(sorted(self.life.running())))
        self.life.tell(StepFailed(step_id), is_last=is_last)

    @precondition(lambda self: self.life.touching)
    @rule(data=st.data(), share=st.floats(0, 1) | st.none(), is_last=LAST)
    def touch_ends(self, data: st.DataObject, share: float | None, is_last: bool) -> None:
        assert self.life.touching
        cached = -1
        if share is not None:
            session = self.life.sessions.get(self.life.touching)
            cached = int(share * session.path[-1].end) if session else 0
        self.life.tell(TouchDone(self.life.touching, cached), is_last=is_last)

    @rule(fault=st.sampled_from([*[None] * 9, EngineLost()]) | CAPACITIES, is_last=LAST)
    def engine_is_in_trouble(self, fault: Event | None, is_last: bool) -> None:
        if fault and self.number % 4 == 0:  # seldom, so that much happens in between
            self.life.tell(fault, is_last=is_last)

    @precondition(lambda self: self.life.running())
    @rule(end=st.sampled_from(["ended", *TOOLS]), span_s=st.floats(0, 9))
    def all_in_the_engine_finishes(self, end: object, span_s: float) -> None:
        for step_id, session in list(self.life.running().items()):
            leaf = session.path[-1]
            if not session.has_token:
                self.life.tell(FirstToken(step_id, 0), is_last=False)
            self.life.tell(StepFinished(step_id, Node(leaf.id, leaf.end + 9)), is_last=False)
            self.leave(session, end, is_last=False)
        self.life.schedule()
        self.life.pass_time(span_s)

    # Jobs go their way.

    @rule(data=st.data(), is_last=LAST)
    def step_is_cancelled(self, data: st.DataObject, is_last: bool) -> None:
        here = [s for s in self.life.sessions.values() if s.step]
        if here:
            session = data.draw(st.sampled_from(here))
            assert session.step
            self.life.cancel(session)
            self.life.tell(StepCancelled(session.step.step_id), is_last=is_last)

    @precondition(lambda self: self.life.at(Place.ACTING))
    @rule(data=st.data(), end=st.sampled_from(["ended", "idle", *TOOLS]), is_last=LAST)
    def acting_session_is_heard_of(self, data: st.DataObject, end: object, is_last: bool) -> None:
        self.leave(self.acting(data), end, is_last=is_last)

    @rule(data=st.data(), is_idle=st.booleans(), is_last=LAST)
    def unknown_session_ends(self, data: st.DataObject, is_idle: bool, is_last: bool) -> None:
        gone = [name for name in self.life.gone if name not in self.life.sessions]
        name = data.draw(st.sampled_from(["nobody", *gone]))
        self.life.tell(SessionIdle(name) if is_idle else SessionEnded(name), is_last=False)
        self.life.tell(KVEvicted("nobody", 3), is_last=is_last)

    @precondition(lambda self: self.life.sessions)
    @rule(data=st.data(), is_last=LAST)
    def kv_is_evicted(self, data: st.DataObject, is_last: bool) -> None:
        session = self.life.sessions[data.draw(st.sampled_from(sorted(self.life.sessions)))]
        left = data.draw(st.integers(0, session.path[-1].end))
        self.life.tell(KVEvicted(session.id, left), is_last=is_last)

    @rule(group=st.sampled_from("gh"), is_last=LAST)
    def group_is_resolved(self, group: str, is_last: bool) -> None:
        self.life.tell(GroupResolved(group), is_last=is_last)

    @rule(span_s=SPANS)
    def time_passes(self, span_s: float) -> None:
        if not self.life.is_quiet:
            self.life.schedule()
        self.life.pass_time(span_s)

    # What cannot be.

    @precondition(lambda self: self.life.is_quiet)
    @rule(data=st.data())
    def illegal_event_is_refused_and_changes_nothing(self, data: st.DataObject) -> None:
        event, early_s = data.draw(st.sampled_from(illegal_events(self.life)))
        before = snapshot(self.life.scheduler)
        with pytest.raises(IllegalEventError):
            self.life.scheduler.receive(event, self.life.now - early_s)
        assert snapshot(self.life.scheduler) == before

    @invariant()
    def nothing_is_lost(self) -> None:
        ready, running = self.life.scheduler.counts()
        assert ready + running >= len(self.life.running())

    def teardown(self) -> None:
        if hasattr(self, "life"):
            self.life.drain()
            replayed(self.life)

    def acting(self, data: st.DataObject) -> Sitting:
        """Return any session whose tools are out."""
        return data.draw(st.sampled_from(self.life.at(Place.ACTING)))


SIZES = st.one_of(st.integers(1, 60), st.integers(1, 500))


def illegal_events(life: Life) -> list[tuple[Event, float]]:
    """Return events that cannot be now, each with how long ago it is told to have been."""
    capacity = life.capacity
    other = CapacityChanged(capacity.max_num_seqs, capacity.num_blocks, 8, 100, 100)
    found: list[tuple[Event, float]] = [
        (other, 0.0),
        (StepFinished("nobody", Node("n", 9)), 0.0),
        (StepFailed("nobody"), 0.0),
        (FirstToken("nobody", 0), 0.0),
        (StepCancelled("nobody"), 0.0),
        (ToolsStarted("nobody", ()), 0.0),
        (TouchDone("nobody", 0), 0.0),
    ]
    for session in life.sessions.values():
        if session.step is None:
            found.append((EngineLost(), life.now - life.log[-1][1] + 1.0))
            continue
        step, leaf = session.step, session.path[-1]
        found += [(step, 0.0), (SessionEnded(session.id), 0.0), (SessionIdle(session.id), 0.0)]
        found.append((ToolsStarted(session.id, ()), 0.0))
        another = StepReady("another", session.id, session.path, 1, is_new=False)
        found.append((another, 0.0))
        if session.place is Place.READY:
            found += [(StepFailed(step.step_id), 0.0), (FirstToken(step.step_id, 0), 0.0)]
        else:
            shorter = Node(leaf.id, leaf.end - 1)
            found.append((StepFinished(step.step_id, shorter), 0.0))
            if session.has_token:
                found.append((FirstToken(step.step_id, 0), 0.0))
    return found


def replayed(life: Life) -> None:
    """Assert that another scheduler decides the same when it is told the same."""
    again = ReadyCohort(life.first_capacity, life.settings)
    for event, now, decisions in life.log:
        if event is None:
            assert again.schedule(now) == decisions
        else:
            again.receive(event, now)


def test_scheduler_keeps_its_promises_whatever_happens() -> None:
    run_state_machine_as_test(
        ReadyCohortMachine,
        settings=settings(
            max_examples=200,
            stateful_step_count=40,
            deadline=None,
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
            suppress_health_check=list(HealthCheck),
            print_blob=True,
            report_multiple_bugs=False,
        ),
    )
