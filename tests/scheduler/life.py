"""A shell and an engine around a `ReadyCohort`, as a plain independent model that checks it.

It knows what it has told and what was decided, and asserts after each call what must hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from inference_service.scheduler.decision import (
    Abort,
    Decision,
    Dispatch,
    Prewarm,
    Refresh,
    Reject,
    Shed,
)
from inference_service.scheduler.event import (
    CapacityChanged,
    EngineLost,
    Event,
    FirstToken,
    Node,
    SessionEnded,
    SessionIdle,
    StepFailed,
    StepFinished,
    StepReady,
    TouchDone,
)
from inference_service.scheduler.ready_cohort import ReadyCohort
from inference_service.scheduler.setting import SchedulerSettings

MAX_WAKES = 200
"""Wakes that time may pass through at once."""


class Place(StrEnum):
    """Where a session of the model is."""

    READY = "ready"
    RUNNING = "running"
    ACTING = "acting"


@dataclass(eq=False)
class Sitting:
    """A session that the scheduler should know: its context and its step, if it has one."""

    id: str
    path: tuple[Node, ...]
    place: Place = Place.READY
    step: StepReady | None = None
    arrival: int = 0
    is_admitted: bool = False
    has_token: bool = False
    is_aborting: bool = False
    ended: int = 0
    """When its last step finished, in the order of events."""


@dataclass(eq=False)
class Overtaken:
    """The oldest waiting step that others have overtaken, and what ran when it became due."""

    step_id: str
    since_s: float
    before: set[str] | None = None


@dataclass
class Life:
    """One scheduler, told by `tell`; `log` has every call and its answer."""

    capacity: CapacityChanged
    settings: SchedulerSettings
    now: float = 0.0
    sessions: dict[str, Sitting] = field(default_factory=dict)
    gone: dict[str, tuple[Node, ...]] = field(default_factory=dict)
    former: set[str] = field(default_factory=set[str])
    """Sessions gone by a failed step: they are admitted already if they come back."""
    touching: str | None = None
    prewarming: str | None = None
    """The session being touched, if that is a prewarm and its step must wait for it."""
    log: list[tuple[Event | None, float, list[Decision]]] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)
    """Times that each step was dispatched, less the times it has ended."""
    is_quiet: bool = True
    """Whether `schedule` was called after the last event."""

    def __post_init__(self) -> None:
        self.scheduler = ReadyCohort(self.capacity, self.settings)
        self.overtaken_s: dict[str, float] = {}
        self.oldest: Overtaken | None = None
        self.num_arrivals = 0
        self.shrunk = False
        self.first_capacity = self.capacity

    # What the model knows.

    def at(self, place: Place) -> list[Sitting]:
        """Return the sessions at a place, in a stable order."""
        return [session for session in self.sessions.values() if session.place is place]

    def running(self) -> dict[str, Sitting]:
        """Return the sessions in the engine by step."""
        return {s.step.step_id: s for s in self.at(Place.RUNNING) if s.step}

    # What is told.

    def tell(self, event: Event, *, is_last: bool = True) -> list[Decision]:
        """Tell an event that is legal; if it is the last of a moment, schedule too."""
        self.scheduler.receive(event, self.now)
        self.log.append((event, self.now, []))
        self.is_quiet = False
        self._note(event)
        return self.schedule() if is_last else []

    def schedule(self) -> list[Decision]:
        """Let the scheduler decide, carry that out, and check what must hold."""
        decisions = self.scheduler.schedule(self.now)
        self.log.append((None, self.now, decisions))
        self.is_quiet = True
        touching = self.touching
        for decision in decisions:
            self._carry_out(decision)
        assert self.scheduler.schedule(self.now) == [], "nothing has happened in between"
        self.log.append((None, self.now, []))
        self._check(touching)
        return decisions

    def pass_time(self, span_s: float) -> None:
        """Let time pass, through every wake that was asked for."""
        end_s = self.now + span_s
        for _ in range(MAX_WAKES):
            wake_s = self.scheduler.next_wake(self.now)
            assert wake_s is None or wake_s > self.now
            if wake_s is None or wake_s > end_s:
                break
            self.now = wake_s
            self.schedule()
        else:
            return  # that is as far as time has come
        self.now = end_s
        self.schedule()

    # How the model goes on.

    def _note(self, event: Event) -> None:
        match event:
            case StepReady():
                self._note_ready(event)
            case FirstToken(step_id):
                self.running()[step_id].has_token = True
            case StepFinished(step_id, leaf):
                session = self._ended(step_id)
                session.path = (*session.path[:-1], leaf)
                session.place, session.step = Place.ACTING, None
                session.ended = len(self.log)
            case StepFailed(step_id):
                self._fail(step_id)
            case TouchDone():
                self.touching = self.prewarming = None
            case EngineLost():
                for step_id in list(self.running()):
                    self._fail(step_id)
                self.touching = self.prewarming = None
            case SessionEnded(session_id):
                self.forget(session_id)
                self.former.discard(session_id)
            case SessionIdle(session_id):
                self.former.discard(session_id)
            case CapacityChanged():
                self.shrunk |= (
                    event.num_blocks < self.capacity.num_blocks
                    or event.max_num_seqs < self.capacity.max_num_seqs
                )
                self.capacity = event
            case _:
                pass

    def _note_ready(self, ready: StepReady) -> None:
        session = self.sessions.get(ready.session)
        if session is None:
            session = self.sessions[ready.session] = Sitting(ready.session, ready.path)
            session.is_admitted = not ready.is_new or ready.session in self.former
            self.former.discard(ready.session)
        session.path, session.place, session.step = ready.path, Place.READY, ready
        session.has_token = session.is_aborting = False
        self.num_arrivals += 1
        session.arrival = self.num_arrivals

    def _ended(self, step_id: str) -> Sitting:
        session = self.running()[step_id]
        self.ends[step_id] -= 1
        return session

    def _fail(self, step_id: str) -> None:
        session = self._ended(step_id)
        self.forget(session.id)
        self.former.add(session.id)

    def forget(self, session_id: str) -> None:
        """Note that the scheduler knows a session no more."""
        if session := self.sessions.pop(session_id, None):
            self.gone[session_id] = session.path
            if self.prewarming == session_id:
                self.prewarming = None

    def forget_waiting(self, step_id: str) -> None:
        """Note that a waiting step is gone, and its session with it."""
        session = next(s for s in self.at(Place.READY) if s.step and s.step.step_id == step_id)
        self.forget(session.id)

    def forget_longest_away(self) -> None:
        """Note that the session that acts longest is forgotten."""
        acting = self.at(Place.ACTING)
        self.forget(min(acting, key=lambda session: session.ended).id)

    def cancel(self, session: Sitting) -> None:
        """Note that a step is cancelled: a waiting one is gone, another will be aborted."""
        if session.place is Place.READY:
            self.forget(session.id)
        else:
            session.is_aborting = True

    def drain(self) -> None:
        """Let everything in the engine end, and all that acts; then everything waiting must go."""
        if not self.is_quiet:
            self.schedule()
        for _ in range(1_000):
            acting = self.at(Place.ACTING)
            if self.touching:
                self.tell(TouchDone(self.touching, -1))
            elif acting:
                self.tell(SessionEnded(acting[0].id))
            elif running := self.running():
                step_id, session = next(iter(running.items()))
                self.tell(StepFinished(step_id, session.path[-1]))
            elif not self.sessions:
                return
            else:
                break
        raise AssertionError(f"steps are left in line: {self.at(Place.READY)}")

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Dispatch(cohort):
                assert cohort
                for step_id in cohort:
                    self._dispatch(step_id)
            case Abort(step_id):
                assert self.running()[step_id].is_aborting, "nobody has cancelled that"
            case Reject(step_id, _, size, limit):
                assert size > limit
                self.forget_waiting(step_id)
            case Shed(step_id):
                self.forget_waiting(step_id)
            case Refresh(session_id, num_tokens) | Prewarm(session_id, num_tokens):
                assert self.touching is None, "two touches at once"
                session = self.sessions[session_id]
                assert session.place is not Place.RUNNING
                assert 0 < num_tokens <= session.path[-1].end
                self.touching = session_id
                if isinstance(decision, Prewarm):
                    assert not self.running(), "the engine has something else to do"
                    self.prewarming = session_id

    def _dispatch(self, step_id: str) -> None:
        waiting = {s.step.step_id: s for s in self.at(Place.READY) if s.step}
        session = waiting.pop(step_id)
        assert session.id != self.prewarming, "what a prewarm computes is computed twice"
        session.place = Place.RUNNING
        self.ends[step_id] = self.ends.get(step_id, 0) + 1
        assert self.ends[step_id] == 1, "a step is in the engine once"
        self.overtaken_s.pop(step_id, None)
        if not session.is_admitted:
            session.is_admitted = True
            for other in waiting.values():
                if other.arrival < session.arrival and other.step:
                    self.overtaken_s.setdefault(other.step.step_id, self.now)

    # What must hold.

    def _check(self, touching: str | None) -> None:
        if not self.shrunk:
            self.scheduler.check_integrity()
        elif not self.running():
            self.shrunk = False
        ready, running = self.at(Place.READY), self.running()
        assert self.scheduler.counts() == (len(ready), len(running))
        places = [self.scheduler.place_in_line(s.step.step_id) for s in ready if s.step]
        assert sorted(p for p in places if p is not None) == list(range(len(ready)))
        assert all(self.scheduler.place_in_line(step_id) is None for step_id in running)
        view = self.scheduler.view(self.now)
        assert view.acting == len(self.at(Place.ACTING))
        acting = any(s for s in self.at(Place.ACTING))
        if ready and not running and not self._may_wait_for_touch():
            assert acting, "an idle engine, nothing to wait for, and a step that fits"
            assert self.scheduler.next_wake(self.now) is not None
        self._check_overtaken()

    def _may_wait_for_touch(self) -> bool:
        """Whether steps may wait for the end of a touch.

        All may before a refresh; before a prewarm, its own session's and those that do not fit
        beside what that session keeps.
        """
        return (self.touching if self.settings.refresh else self.prewarming) is not None

    def _check_overtaken(self) -> None:
        waiting = {s.step.step_id: s for s in self.at(Place.READY) if s.step}
        for step_id in [step_id for step_id in self.overtaken_s if step_id not in waiting]:
            del self.overtaken_s[step_id]
        firm = [s for s in waiting.values() if s.step and not s.step.is_speculative]
        eldest = min(firm, key=lambda session: session.arrival, default=None)
        eldest_id = eldest.step.step_id if eldest and eldest.step else ""
        if eldest_id not in self.overtaken_s:
            self.oldest = None
        elif self.oldest is None or self.oldest.step_id != eldest_id:
            self.oldest = Overtaken(eldest_id, self.now)
        if self.oldest is None or self.now < self.oldest.since_s + self.settings.max_overtaken_s:
            return
        running = set(self.running())
        if self.oldest.before is None:
            self.oldest.before = running
        self.oldest.before &= running
        assert self.oldest.before or self.touching, f"{self.oldest} is due and fits"
        assert running <= self.oldest.before or self.touching, "overtaken though it is due"
