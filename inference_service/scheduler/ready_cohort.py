"""The ready-cohort scheduler: which steps go to the engine now, and whose KV stays there.

Theory of operation. A *step* is in exactly one place:

    StepReady      -> READY (in line); gone by Reject if it can never fit
    Dispatch       READY -> PREFILL
    FirstToken     PREFILL -> DECODE
    StepFinished   PREFILL | DECODE -> gone; its session acts
    StepFailed     PREFILL | DECODE -> gone; its session is forgotten, a retry comes back as known
    StepCancelled  READY -> gone; PREFILL | DECODE -> Abort is ordered, gone at StepFailed
    Shed           READY -> gone: deadline or time to live over, or its fan-out group resolved

A *session* is admitted when its first step is dispatched, and has its place by that from then on.
It is READY, RUNNING or ACTING with its step, and forgotten when it ends or idles. Admitted sessions
are *kept* (their KV is held between steps, by leases) as long as the forecast of what all kept
sessions will grow to allows it; the others are *cold* and compute their context again.

`schedule` goes through the line in order and dispatches every step that fits: as long as the engine
has a seat and its own queue stays shallow, no step that fits waits. What fits is in `room.py`, the
order in `line.py`, what leases are worth in `lease.py`. Then, if the engine would idle, it weighs
letting leases give way against waiting. Before a step allocates, kept sessions that the engine
would evict next are touched (`touch.py`); the step waits for that, since it is what keeps hits.

A step that sessions which came later have overtaken for half of `max_overtaken_s` is a barrier: no
new session is admitted before it. After the other half it is due: leases give way to it.

Everything is learned from events (`gap.py`, `rate.py`, `forecast.py`); nothing is told about the
workload. No clock, no chance: same events, same decisions.
"""

from __future__ import annotations

import math

from inference_service.scheduler.admission import Admission
from inference_service.scheduler.decision import Abort, Decision, Dispatch, Reject, Shed
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
from inference_service.scheduler.lease import Leases
from inference_service.scheduler.line import Line
from inference_service.scheduler.protocol import IllegalEventError
from inference_service.scheduler.rate import RateModel
from inference_service.scheduler.room import Room
from inference_service.scheduler.session import Phase, Session, State, Step
from inference_service.scheduler.setting import SchedulerSettings
from inference_service.scheduler.touch import Touches
from inference_service.scheduler.view import SchedulerView, lease_view

RECONSIDER_S = 0.1
"""Time between two looks at an idle engine with a line in front of it: chances change with time."""

IDLE_LOOKAHEAD = 8
"""Waiting steps that are weighed for an idle engine."""


class ReadyCohort:
    """The `Scheduler` that Muster serves with."""

    def __init__(
        self, capacity: CapacityChanged, settings: SchedulerSettings | None = None
    ) -> None:
        self._settings = settings or SchedulerSettings()
        self._kv = KVModel(capacity.num_blocks, capacity.block_size)
        self._gaps = GapModel()
        self._rate = RateModel()
        self._leases = Leases(self._kv, self._gaps, self._rate)
        self._admission = Admission(self._kv, self._gaps, self._rate)
        self._room = Room(
            capacity, self._settings, self._kv, self._leases, self._admission, self._rate
        )
        self._touches = Touches(self._kv, self._gaps, self._rate)
        self._line = Line(self._settings.tenant_weights)
        self._sessions: dict[str, Session] = {}
        self._away: dict[str, Session] = {}
        self._engine: dict[str, Step] = {}
        self._uncomputed = 0
        self._new_in_engine = 0
        self._due: list[Decision] = []
        self._arrivals = 0
        self._admissions = 0
        self._disagreements = 0
        self._disagreement_tokens = 0
        self._barrier: tuple[Step, float] | None = None
        self._wake_s: float | None = None
        self._now = -math.inf

    # What has happened.

    def receive(self, event: Event, now: float) -> None:
        """Note an event. Raises `IllegalEventError`, and changes nothing, if it cannot be."""
        if now < self._now:
            raise IllegalEventError(f"time ran back from {self._now} to {now}")
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
                step = self._dispatched(step_id)
                self._leave_engine(step, 0, now)
                self._forget(step.session)
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
                self._line.group_resolved(group)
                self._shed(self._line.of_group(group), "its group is resolved")
            case CapacityChanged():
                self._capacity_changed(event)
            case EngineLost():
                self._engine_lost(now)
        self._now = now

    def _step_ready(self, ready: StepReady, now: float) -> None:
        if ready.step_id in self._line or ready.step_id in self._engine:
            raise IllegalEventError(f"step {ready.step_id!r} is here already")
        if any(isinstance(d, Reject | Shed) and d.step_id == ready.step_id for d in self._due):
            raise IllegalEventError(f"step {ready.step_id!r} is refused already")
        session = self._sessions.get(ready.session)
        if session and session.state in (State.READY, State.RUNNING):
            raise IllegalEventError(f"session {ready.session!r} has a step here already")
        if rejection := self._never_fits(ready):
            self._due.append(rejection)
            if session:  # its context only grows
                self._forget(session)
            return
        if session is None:
            session = self._sessions[ready.session] = Session(ready.session, ready.tenant)
            if not ready.is_new:
                self._admit(session)
        elif session.state is State.ACTING:
            self._gaps.come_back(session.id, session.gap_key, now)
            self._leases.back(session)
            self._away.pop(session.id, None)
        session.state = State.READY
        self._continue_path(session, ready)
        self._arrivals += 1
        self._line.add(Step(ready, session, self._arrivals))

    def _continue_path(self, session: Session, ready: StepReady) -> None:
        """Let the session's chain be the step's prompt, cached as far as the engine says."""
        is_kept = session.holds
        if is_kept:
            self._leases.release(session)
        session.chain = self._kv.extended(session.chain, ready.path)
        if ready.cached_tokens is not None:
            self._kv.correct(session.chain, ready.cached_tokens)
        if is_kept:
            self._leases.hold(session)
            self._admission.keep(session)

    def _step_cancelled(self, step_id: str) -> None:
        if step := self._line.get(step_id):
            self._take_out(step)
            return
        if self._withdraw(step_id):
            return
        step = self._dispatched(step_id)
        if not step.is_aborting:
            step.is_aborting = True
            self._due.append(Abort(step_id))

    def _first_token(self, step_id: str, cached_tokens: int | None, now: float) -> None:
        step = self._dispatched(step_id)
        if step.phase is not Phase.PREFILL:
            raise IllegalEventError(f"step {step_id!r} has had its first token")
        step.phase = Phase.DECODE
        self._uncomputed -= step.uncomputed
        cached = step.expected_cached if cached_tokens is None else cached_tokens
        self._rate.first_token(step_id, step.ready.prompt_tokens - cached, now)
        self._compare(step, cached_tokens)

    def _compare(self, step: Step, cached_tokens: int | None) -> None:
        """Compare what the model of the cache promised with what the engine found cached."""
        if cached_tokens is None:
            return
        self._touches.came_back(step.session, cached_tokens)
        if step.expected_cached != cached_tokens:
            self._disagreements += 1
            self._disagreement_tokens += abs(step.expected_cached - cached_tokens)

    def _step_finished(self, event: StepFinished, now: float) -> None:
        step = self._dispatched(event.step_id)
        session = step.session
        if event.leaf.end < session.tokens:
            raise IllegalEventError(f"step {step.id!r} ends before its prompt does: {event.leaf}")
        self._compare(step, event.cached_tokens)
        output_tokens = event.leaf.end - session.tokens
        self._kv.grow(session.chain[-1], event.leaf.end)
        self._leave_engine(step, output_tokens, now)
        session.steps += 1
        session.state = State.ACTING
        session.away_since, session.gap_key, session.tools = now, "", ()
        self._away[session.id] = session
        self._line.member_finished(step.ready.fan_out)
        self._admission.step_finished(session)
        if session.holds:
            self._leases.hold(session)
            self._admission.keep(session)
        self._admission.plan(
            self._room.watermark, len(self._sessions), self._room.capacity.max_num_seqs, now
        )

    def _tools_started(self, event: ToolsStarted, now: float) -> None:
        session = self._sessions.get(event.session)
        if session is None or session.state is not State.ACTING:
            raise IllegalEventError(f"session {event.session!r} has no step that has just ended")
        self._gaps.give_up(session.id, session.gap_key)  # more tools than were told at first
        session.tools = event.tools
        session.gap_key = self._gaps.leave(session.id, event.tools, now)
        self._leases.away(session)
        if len(self._away) > self._settings.max_sessions:
            self._forget(next(iter(self._away.values())))

    def _session_gone(self, session_id: str, *, has_ended: bool) -> None:
        session = self._sessions.get(session_id)
        if session is None:
            return
        if session.state in (State.READY, State.RUNNING):
            raise IllegalEventError(f"session {session_id!r} has a step here")
        if has_ended:
            self._admission.session_ended(session)
        self._forget(session)

    def _touch_done(self, session_id: str, cached_tokens: int) -> None:
        session = self._touches.under_way
        if session is None or session.id != session_id:
            raise IllegalEventError(f"session {session_id!r} is not being touched")
        self._touches.done(session, cached_tokens)

    def _evicted(self, session_id: str, cached_tokens: int) -> None:
        session = self._sessions.get(session_id)
        if session and session.chain:
            self._kv.correct(session.chain, min(cached_tokens, session.tokens))

    def _capacity_changed(self, capacity: CapacityChanged) -> None:
        if capacity.block_size != self._kv.block_size:
            raise IllegalEventError(
                f"blocks of {self._kv.block_size} tokens cannot become {capacity.block_size}"
            )
        self._room.capacity = capacity
        self._kv.num_blocks = capacity.num_blocks
        for step in self._line.first(len(self._line)):
            if rejection := self._never_fits(step.ready):
                self._take_out(step)
                self._due.append(rejection)

    def _engine_lost(self, now: float) -> None:
        for step in list(self._engine.values()):
            self._leave_engine(step, 0, now)
            self._forget(step.session)
        self._rate.lost()
        self._touches.lost()
        self._kv.clear()

    # What is to be done.

    def schedule(self, now: float) -> list[Decision]:
        """Return what is to be done now: ends first, since they make room, then one cohort."""
        assert now >= self._now, (now, self._now)
        self._now = now
        self._wake_s = None
        self._shed(self._line.expired(now), "its time is over")
        if self.retry_after_s() is not None:
            self._shed(self._line.speculative(), "the line is full")
        for session in self._leases.ended(now):
            self._room.release(session)
        decisions, self._due = self._due, []
        cohort = self._cohort(now)
        if cohort:
            decisions.append(Dispatch(tuple(step.id for step in cohort)))
        decisions += self._due
        self._due = []
        if self._settings.prewarm and not (self._engine or self._touches.under_way):
            room = self._room.watermark - self._room.working_set
            if prewarm := self._touches.prewarm(self._leases.acting(), room, now):
                decisions.append(prewarm)
        return decisions

    def _cohort(self, now: float) -> list[Step]:
        """Dispatch every waiting step that may go; shared prefixes adjacent."""
        cohort = self._passes(now)
        if not self._engine and len(self._line) and not self._touches.under_way:
            waiting = self._line.first(IDLE_LOOKAHEAD)
            idle = self._room.worth_yielding(waiting, now)
            if idle is None:
                self._wake_s = now + RECONSIDER_S
            elif not self._must_wait_for_touch(idle):
                cohort = [self._dispatch(idle, now), *self._passes(now)]
        return sorted(cohort, key=lambda step: step.ready.path[0].id)

    def _passes(self, now: float) -> list[Step]:
        """Go through the line until nothing goes: what goes may bring blocks that others share."""
        cohort: list[Step] = []
        while found := self._pass(now):
            cohort += found
        return cohort

    def _pass(self, now: float) -> list[Step]:
        """Go through the line once, in order; return what has been dispatched."""
        cohort: list[Step] = []
        refused: dict[bool, tuple[int, int]] = {}
        for step, is_due in self._candidates(now):
            if self._seats() <= 0:
                break
            if not self._engine_takes(step):
                if is_due:
                    break
                continue
            is_new = step.session.admitted is None
            size = self._room.size(step)
            if _is_larger(size, refused.get(is_new)) and not is_due:
                continue
            if not self._room.fits(step, now, is_due=is_due):
                refused[is_new] = size
                if is_due:
                    break
                continue
            if self._must_wait_for_touch(step):
                break
            cohort.append(self._dispatch(step, now))
        return cohort

    def _candidates(self, now: float) -> list[tuple[Step, bool]]:
        """Return waiting steps in order, each with whether it is due; see the head of this file."""
        steps = self._line.first(self._settings.lookahead)
        aged, is_due = self._aged(now)
        if aged is None:
            return [(step, False) for step in steps]
        found = [(s, False) for s in steps if s.session.admitted is not None and s is not aged]
        found.insert(0 if is_due else len(found), (aged, is_due))
        return found

    def _aged(self, now: float) -> tuple[Step | None, bool]:
        patience_s = self._settings.max_overtaken_s / 2
        oldest = self._line.oldest_overtaken()
        if oldest is None or now < oldest[1] + patience_s:
            self._barrier = None
            return None, False
        step = oldest[0]
        if self._barrier is None or self._barrier[0] is not step:
            self._barrier = (step, now)
        return step, now >= self._barrier[1] + patience_s

    def _seats(self) -> int:
        return self._room.capacity.max_num_seqs + 1 - len(self._engine)

    def _engine_takes(self, step: Step) -> bool:
        """Whether the engine's own queue stays shallow with this step."""
        if not self._uncomputed:
            return True
        uncomputed = step.ready.prompt_tokens - self._kv.cached_tokens(step.session.chain)
        return self._uncomputed + uncomputed <= self._room.capacity.prefill_tokens

    def _must_wait_for_touch(self, step: Step) -> bool:
        """Whether a kept session must be touched before this step allocates; orders that."""
        if not self._settings.refresh:
            return False
        if self._touches.under_way:
            return True
        blocks = self._room.missing(step)
        refresh = self._touches.refresh(self._sessions, step.session, blocks)
        if refresh:
            self._due.append(refresh)
        return refresh is not None

    def _dispatch(self, step: Step, now: float) -> Step:
        session, block = step.session, self._kv.block_size
        self._line.remove(step)
        if session.admitted is None:
            self._admit(session)
            self._line.admitted(step, now)
        last_whole = (session.tokens - 1) // block * block
        step.expected_cached = min(self._kv.cached_tokens(session.chain), last_whole)
        step.uncomputed = session.tokens - step.expected_cached
        self._room.enter(step)
        self._rate.entered(now)
        self._uncomputed += step.uncomputed
        self._new_in_engine += step.ready.is_new
        self._engine[step.id] = step
        step.phase = Phase.PREFILL
        session.state = State.RUNNING
        return step

    # How places change.

    def _leave_engine(self, step: Step, output_tokens: int, now: float) -> None:
        del self._engine[step.id]
        self._withdraw(step.id)
        self._rate.left(step.id, output_tokens, now)
        self._room.leave(step)
        self._new_in_engine -= step.ready.is_new
        if step.phase is Phase.PREFILL:
            self._uncomputed -= step.uncomputed

    def _withdraw(self, step_id: str) -> bool:
        """Take back what is ordered but not yet told of a step; whether there was anything."""
        left = [
            due
            for due in self._due
            if not (isinstance(due, Abort | Reject | Shed) and due.step_id == step_id)
        ]
        withdrawn = len(left) < len(self._due)
        self._due = left
        return withdrawn

    def _admit(self, session: Session) -> None:
        self._admissions += 1
        session.admitted = self._admissions

    def _take_out(self, step: Step) -> None:
        """Remove a waiting step and its session: if its job goes on, it comes back as known."""
        self._line.remove(step)
        self._forget(step.session)

    def _shed(self, steps: list[Step], reason: str) -> None:
        for step in steps:
            self._take_out(step)
            self._due.append(Shed(step.id, reason))

    def _forget(self, session: Session) -> None:
        self._gaps.give_up(session.id, session.gap_key)
        self._room.release(session)
        self._kv.forget(session.chain)
        session.chain = []
        self._away.pop(session.id, None)
        del self._sessions[session.id]

    def _dispatched(self, step_id: str) -> Step:
        try:
            return self._engine[step_id]
        except KeyError:
            raise IllegalEventError(f"step {step_id!r} is not in the engine") from None

    def _never_fits(self, ready: StepReady) -> Reject | None:
        limits = {
            "the model's context window": self._room.capacity.max_model_len,
            "the KV cache": self._room.watermark * self._kv.block_size,
        }
        what, limit = min(limits.items(), key=lambda item: item[1])
        size = ready.prompt_tokens + ready.max_tokens
        return Reject(ready.step_id, what, size, limit) if size > limit else None

    # What others may ask.

    def next_wake(self, now: float) -> float | None:
        """Return when time alone may change what is to be done, or None if it cannot."""
        times = [self._line.next_expiry(), self._wake_s]
        if oldest := self._line.oldest_overtaken():
            is_barrier = self._barrier is not None and self._barrier[0] is oldest[0]
            since_s = self._barrier[1] if self._barrier and is_barrier else oldest[1]
            times.append(since_s + self._settings.max_overtaken_s / 2)
        later = [time for time in times if time is not None and time > now]
        return min(later, default=None)

    def retry_after_s(self) -> float | None:
        """Return None if a step of a new session would be taken, else when to ask again."""
        capacity = self._room.capacity
        kv_tokens = capacity.num_blocks * capacity.block_size
        if self._line.queued_tokens <= self._settings.max_queued_kv * kv_tokens:
            return None
        return min(60.0, max(1.0, self._rate.prefill_s(self._line.queued_tokens)))

    def start_window(self) -> int:
        """Return how many steps of new sessions the service may hold at once."""
        return self._new_in_engine + self._settings.max_waiting

    def place_in_line(self, step_id: str) -> int | None:
        """Return how many ready steps go before this one, or None if it is not waiting."""
        return self._line.place(step_id)

    def counts(self) -> tuple[int, int]:
        """Return the number of steps that are (ready, in the engine)."""
        return len(self._line), len(self._engine)

    def view(self, now: float) -> SchedulerView:
        """Return a snapshot for people."""
        ready, running = self.counts()
        sessions = self._sessions.values()
        return SchedulerView(
            ready=ready,
            running=running,
            acting=len(self._away),
            cold=sum(1 for session in sessions if not self._kv.cached_tokens(session.chain)),
            admitted=sum(1 for session in sessions if session.admitted is not None),
            kept=len(self._leases),
            working_set=self._room.working_set,
            watermark=self._room.watermark,
            cold_room=round(self._admission.cold_blocks),
            num_blocks=self._room.capacity.num_blocks,
            disagreements=self._disagreements,
            disagreement_tokens=self._disagreement_tokens,
            yielded=self._room.yielded,
            overhead=self._touches.view(),
            leases=tuple(
                lease_view(
                    session, self._kv, self._leases.remaining_s(session, now, is_view=True), now
                )
                for session in self._leases.acting()
            ),
            gaps=self._gaps.views(now),
        )

    def check_integrity(self) -> None:
        """Assert the invariants that hold between two calls."""
        self._kv.check_integrity()
        assert self._room.running <= self._room.watermark, "running steps can be preempted"
        assert len(self._engine) <= self._room.capacity.max_num_seqs + 1
        running = {step.session.id for step in self._engine.values()}
        waiting = {step.session.id for step in self._line.first(len(self._line))}
        assert not running & waiting, "a session is in two places"
        assert not (running | waiting) & self._away.keys(), "a session is in two places"
        assert running | waiting | self._away.keys() == self._sessions.keys()
        prefilling = [s for s in self._engine.values() if s.phase is Phase.PREFILL]
        assert self._uncomputed == sum(step.uncomputed for step in prefilling)


def _is_larger(size: tuple[int, int], refused: tuple[int, int] | None) -> bool:
    """Whether a step is at least as large as one that did not fit: then it does not fit either.

    Steps of one kind are asked in order, so what may give way to them becomes less.
    """
    return refused is not None and size[0] >= refused[0] and size[1] >= refused[1]
