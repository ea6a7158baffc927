"""Where every step and session is, and what events change about that.

The states and their changes are told at the head of `ready_cohort.py`. An event that cannot be
raises `IllegalEventError` before anything has changed.
"""

from __future__ import annotations

import math
from itertools import pairwise, takewhile

from inference_service.scheduler.admission import Admission
from inference_service.scheduler.decision import Abort, Decision, Reject, Shed
from inference_service.scheduler.event import (
    CapacityChanged,
    EngineLost,
    Event,
    FirstToken,
    GroupResolved,
    KVEvicted,
    SessionEnded,
    SessionIdle,
    StepCancelled,
    StepFailed,
    StepFinished,
    StepReady,
    ToolsStarted,
    TouchDone,
)
from inference_service.scheduler.gap import GapModel
from inference_service.scheduler.kv_model import KVModel
from inference_service.scheduler.lease import LOSS_WINDOW_S, Leases
from inference_service.scheduler.line import Line
from inference_service.scheduler.protocol import IllegalEventError
from inference_service.scheduler.rate import RateModel
from inference_service.scheduler.room import Room
from inference_service.scheduler.session import Phase, Session, State, Step
from inference_service.scheduler.setting import SchedulerSettings
from inference_service.scheduler.touch import Touches

MAX_FORMER = 10_000
"""Failed sessions whose place is remembered; the one that failed first is forgotten first."""


class Places:
    """All steps and sessions, each in exactly one place, and the models that events feed.

    `due` are decisions that follow from events alone.
    """

    def __init__(self, capacity: CapacityChanged, settings: SchedulerSettings) -> None:
        self.kv = KVModel(capacity.num_blocks, capacity.block_size)
        self.gaps = GapModel()
        self.rate = RateModel()
        self.leases = Leases(self.kv, self.gaps, self.rate)
        self.admission = Admission(self.kv, self.gaps, self.rate)
        self.room = Room(capacity, settings, self.kv, self.leases, self.admission, self.rate)
        self.touches = Touches(self.kv, self.gaps, self.rate)
        self.line = Line(settings.tenant_weights)
        self.sessions: dict[str, Session] = {}
        self.away: dict[str, Session] = {}
        self._former: dict[str, Session] = {}
        """Sessions whose step failed: a retry finds its place in the order of admission again."""
        self.engine: dict[str, Step] = {}
        self.uncomputed = 0
        self.new_in_engine = 0
        self.due: list[Decision] = []
        self.disagreements = 0
        self.disagreement_tokens = 0
        self.now = -math.inf
        self._max_sessions = settings.max_sessions
        self._arrivals = 0
        self._admissions = 0

    def receive(self, event: Event, now: float) -> None:
        """Note an event. Raises `IllegalEventError`, and changes nothing, if it cannot be."""
        if now < self.now:
            raise IllegalEventError(f"time ran back from {self.now} to {now}")
        match event:
            case StepReady():
                self._step_ready(event, now)
            case StepCancelled(step_id):
                self._step_cancelled(step_id)
            case FirstToken(step_id, cached_tokens):
                self._first_token(step_id, cached_tokens, now)
            case StepFinished():
                self._step_finished(event, now)
            case StepFailed(step_id):
                self._fail(self._dispatched(step_id), now)
            case ToolsStarted():
                self._tools_started(event, now)
            case SessionIdle(session_id):
                self._session_gone(session_id, has_ended=False)
            case SessionEnded(session_id):
                self._session_gone(session_id, has_ended=True)
            case TouchDone(session_id, cached_tokens):
                self._touch_done(session_id, cached_tokens)
            case KVEvicted(session_id, cached_tokens):
                self._evicted(session_id, cached_tokens)
            case GroupResolved(group):
                self.line.group_resolved(group)
                self.shed(self.line.of_group(group), "its group is resolved")
            case CapacityChanged():
                self._capacity_changed(event)
            case EngineLost():
                self._engine_lost(now)
        self.now = now

    def _step_ready(self, ready: StepReady, now: float) -> None:
        if ready.step_id in self.line or ready.step_id in self.engine:
            raise IllegalEventError(f"step {ready.step_id!r} is here already")
        if any(isinstance(d, Reject | Shed) and d.step_id == ready.step_id for d in self.due):
            raise IllegalEventError(f"step {ready.step_id!r} is refused already")
        if any(above.end > below.end for above, below in pairwise(ready.path)):
            raise IllegalEventError(f"step {ready.step_id!r}: its path shrinks: {ready.path}")
        session = self.sessions.get(ready.session)
        if session and session.state in (State.READY, State.RUNNING):
            raise IllegalEventError(f"session {ready.session!r} has a step here already")
        if rejection := self._never_fits(ready):
            self.due.append(rejection)
            self._former.pop(ready.session, None)
            if session:  # its context only grows
                self._forget(session)
            return
        if session is None:
            session = self._begin(ready)
        elif session.state is State.ACTING:
            self.gaps.come_back(session.id, session.gap_key, now)
            self.leases.back(session)
            self.away.pop(session.id, None)
        session.state = State.READY
        self._continue_path(session, ready)
        self._arrivals += 1
        self.line.add(Step(ready, session, self._arrivals))

    def _begin(self, ready: StepReady) -> Session:
        """Return the session of a step that begins one, or that comes back to one given up."""
        session = self._former.pop(ready.session, None)
        if session:
            self.admission.admitted += 1
        else:
            session = Session(ready.session, ready.tenant)
            if not ready.is_new:
                self._admit(session)
        self.sessions[session.id] = session
        return session

    def _continue_path(self, session: Session, ready: StepReady) -> None:
        """Let the session's chain be the step's prompt, cached as far as the engine says."""
        is_kept = session.holds
        if is_kept:
            self.leases.release(session)
        session.chain = self.kv.extended(session.chain, ready.path)
        if ready.cached_tokens is not None:
            self.kv.correct(session.chain, ready.cached_tokens)
        if is_kept:
            self.leases.hold(session)
            self.admission.keep(session)

    def _step_cancelled(self, step_id: str) -> None:
        if step := self.line.get(step_id):
            self._take_out(step)
            return
        if self._withdraw(step_id):
            return
        step = self._dispatched(step_id)
        if not step.is_aborting:
            step.is_aborting = True
            self.due.append(Abort(step_id))

    def _first_token(self, step_id: str, cached_tokens: int | None, now: float) -> None:
        step = self._dispatched(step_id)
        if step.phase is not Phase.PREFILL:
            raise IllegalEventError(f"step {step_id!r} has had its first token")
        step.phase = Phase.DECODE
        self.uncomputed -= step.uncomputed
        cached = step.expected_cached if cached_tokens is None else cached_tokens
        self.rate.first_token(step_id, step.ready.prompt_tokens - cached, now)
        self._compare(step, cached_tokens)

    def _compare(self, step: Step, cached_tokens: int | None) -> None:
        """Compare what the model of the cache promised with what the engine found cached."""
        if cached_tokens is None:
            return
        self.touches.came_back(step.session, cached_tokens)
        if step.expected_cached != cached_tokens:
            self.disagreements += 1
            self.disagreement_tokens += abs(step.expected_cached - cached_tokens)

    def _step_finished(self, event: StepFinished, now: float) -> None:
        step = self._dispatched(event.step_id)
        session = step.session
        if event.leaf.end < session.tokens:
            raise IllegalEventError(f"step {step.id!r} ends before its prompt does: {event.leaf}")
        self._compare(step, event.cached_tokens)
        output_tokens = event.leaf.end - session.tokens
        self.kv.grow(session.chain[-1], event.leaf.end)
        self._leave_engine(step, output_tokens, now)
        session.steps += 1
        session.state = State.ACTING
        session.away_since, session.gap_key, session.tools = now, "", ()
        self.away[session.id] = session
        self.line.member_finished(step.ready.fan_out)
        self.admission.step_finished(session)
        if session.holds:
            self.leases.hold(session)
            self.leases.away(session)  # by tools that are told next, or by nothing that is told
            self.admission.keep(session)
        hanging = takewhile(lambda s: now - s.away_since > LOSS_WINDOW_S, self.away.values())
        going = len(self.sessions) - sum(1 for _ in hanging)
        self.admission.plan(self.room.watermark, going, self.room.capacity.max_num_seqs, now)

    def _tools_started(self, event: ToolsStarted, now: float) -> None:
        session = self.sessions.get(event.session)
        if session is None or session.state is not State.ACTING:
            raise IllegalEventError(f"session {event.session!r} has no step that has just ended")
        self.gaps.give_up(session.id, session.gap_key)  # more tools than were told at first
        session.tools = event.tools
        session.gap_key = self.gaps.leave(session.id, event.tools, now)
        self.leases.away(session)
        if len(self.away) > self._max_sessions:
            self._forget(next(iter(self.away.values())))

    def _session_gone(self, session_id: str, *, has_ended: bool) -> None:
        session = self.sessions.get(session_id)
        if session is None:
            self._former.pop(session_id, None)
            return
        if session.state in (State.READY, State.RUNNING):
            raise IllegalEventError(f"session {session_id!r} has a step here")
        if has_ended:
            self.admission.session_ended(session)
        self._forget(session)

    def _touch_done(self, session_id: str, cached_tokens: int) -> None:
        session = self.touches.under_way
        if session is None or session.id != session_id:
            raise IllegalEventError(f"session {session_id!r} is not being touched")
        self.touches.done(session, cached_tokens)

    def _evicted(self, session_id: str, cached_tokens: int) -> None:
        session = self.sessions.get(session_id)
        if session and session.chain:
            self.kv.correct(session.chain, min(cached_tokens, session.tokens))

    def _capacity_changed(self, capacity: CapacityChanged) -> None:
        if capacity.block_size != self.kv.block_size:
            raise IllegalEventError(
                f"blocks of {self.kv.block_size} tokens cannot become {capacity.block_size}"
            )
        self.room.capacity = capacity
        if capacity.num_blocks != self.kv.num_blocks:
            self.kv.clear()  # another cache, and what it holds is not known
            self.kv.num_blocks = capacity.num_blocks
        for step in self.line.first(len(self.line)):
            if rejection := self._never_fits(step.ready):
                self._take_out(step)
                self.due.append(rejection)

    def _engine_lost(self, now: float) -> None:
        for step in list(self.engine.values()):
            self._fail(step, now)
        self.rate.lost()
        self.touches.lost()
        self.kv.clear()

    def dispatch(self, step: Step, now: float) -> Step:
        """Move a step from the line to the engine."""
        session, block = step.session, self.kv.block_size
        self.line.remove(step)
        if session.admitted is None:
            self._admit(session)
        if not session.steps:
            self.line.began(step, now)
        last_whole = (session.tokens - 1) // block * block
        step.expected_cached = min(self.kv.cached_tokens(session.chain), last_whole)
        step.uncomputed = session.tokens - step.expected_cached
        self.line.charge(session.tenant, step.uncomputed, is_first=not session.steps)
        self.room.enter(step)
        self.rate.entered(now)
        self.uncomputed += step.uncomputed
        self.new_in_engine += step.ready.is_new
        self.engine[step.id] = step
        step.phase = Phase.PREFILL
        session.state = State.RUNNING
        return step

    def _leave_engine(self, step: Step, output_tokens: int, now: float) -> None:
        del self.engine[step.id]
        self._withdraw(step.id)
        self.rate.left(step.id, output_tokens, now)
        self.room.leave(step)
        self.new_in_engine -= step.ready.is_new
        if step.phase is Phase.PREFILL:
            self.uncomputed -= step.uncomputed

    def _fail(self, step: Step, now: float) -> None:
        """Let a step come to nothing; its session is forgotten, but for its place."""
        self._leave_engine(step, 0, now)
        session = step.session
        self._forget(session)
        session.prewarmed_tokens = 0
        self._former[session.id] = session
        if len(self._former) > MAX_FORMER:
            del self._former[next(iter(self._former))]

    def _withdraw(self, step_id: str) -> bool:
        """Take back what is ordered but not yet told of a step; whether there was anything."""
        left = [
            due
            for due in self.due
            if not (isinstance(due, Abort | Reject | Shed) and due.step_id == step_id)
        ]
        withdrawn = len(left) < len(self.due)
        self.due = left
        return withdrawn

    def _admit(self, session: Session) -> None:
        self._admissions += 1
        session.admitted = self._admissions
        self.admission.admitted += 1

    def _take_out(self, step: Step) -> None:
        """Remove a waiting step and its session: if its job goes on, it comes back as known."""
        self.line.remove(step)
        self._forget(step.session)

    def shed(self, steps: list[Step], reason: str) -> None:
        """Take waiting steps out that are not worth running any more."""
        for step in steps:
            self._take_out(step)
            self.due.append(Shed(step.id, reason))

    def _forget(self, session: Session) -> None:
        self.gaps.give_up(session.id, session.gap_key)
        self.admission.admitted -= session.admitted is not None
        self.room.release(session)
        self.kv.forget(session.chain)
        session.chain = []
        self.away.pop(session.id, None)
        del self.sessions[session.id]

    def _dispatched(self, step_id: str) -> Step:
        try:
            return self.engine[step_id]
        except KeyError:
            raise IllegalEventError(f"step {step_id!r} is not in the engine") from None

    def _never_fits(self, ready: StepReady) -> Reject | None:
        limits = {
            "the model's context window": self.room.capacity.max_model_len,
            "the KV cache": self.room.watermark * self.kv.block_size,
        }
        what, limit = min(limits.items(), key=lambda item: item[1])
        size = ready.prompt_tokens + ready.max_tokens
        return Reject(ready.step_id, what, size, limit) if size > limit else None

    def check_integrity(self) -> None:
        """Assert the invariants that hold between two calls."""
        self.kv.check_integrity()
        assert self.room.running <= self.room.watermark, "running steps can be preempted"
        assert len(self.engine) <= self.room.capacity.max_num_seqs + 1
        running = {step.session.id for step in self.engine.values()}
        waiting = {step.session.id for step in self.line.first(len(self.line))}
        assert not running & waiting, "a session is in two places"
        assert not (running | waiting) & self.away.keys(), "a session is in two places"
        assert running | waiting | self.away.keys() == self.sessions.keys()
        prefilling = [s for s in self.engine.values() if s.phase is Phase.PREFILL]
        assert self.uncomputed == sum(step.uncomputed for step in prefilling)
