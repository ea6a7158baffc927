"""The ready-cohort scheduler: which steps go to the engine now, and whose KV stays there.

Theory of operation. A *step* is in exactly one place:

    StepReady      -> READY (in line); gone by Reject if it can never fit
    Dispatch       READY -> PREFILL
    FirstToken     PREFILL -> DECODE
    StepFinished   PREFILL | DECODE -> gone; its session acts
    StepFailed     PREFILL | DECODE -> gone; its session is forgotten, but a retry finds its place
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
would evict next are touched (`touch.py`); the step waits for that, since it is what keeps hits. An
idle engine computes evicted sessions shortly before they are expected back; such a prewarm holds
back its own session's step, and no other.

A step that sessions which came later have overtaken for half of `max_overtaken_s` is a barrier: no
new session is admitted before it. After the other half it is due: leases give way to it.

Everything is learned from events (`gap.py`, `rate.py`, `forecast.py`); nothing is told about the
workload. No clock, no chance: same events, same decisions.
"""

from __future__ import annotations

from inference_service.scheduler.decision import Decision, Dispatch, Prewarm
from inference_service.scheduler.event import CapacityChanged, Event
from inference_service.scheduler.lifecycle import Places
from inference_service.scheduler.overtaking import Overtaking
from inference_service.scheduler.session import Kind, Step
from inference_service.scheduler.setting import SchedulerSettings
from inference_service.scheduler.view import SchedulerView, lease_view

RECONSIDER_S = 0.1
"""Time between two looks at an idle engine with a line in front of it: chances change with time."""


class ReadyCohort:
    """The `Scheduler` that Muster serves with."""

    def __init__(
        self, capacity: CapacityChanged, settings: SchedulerSettings | None = None
    ) -> None:
        self._settings = settings or SchedulerSettings()
        self._places = Places(capacity, self._settings)
        self._line = self._places.line
        self._room = self._places.room
        self._leases = self._places.leases
        self._touches = self._places.touches
        self._overtaking = Overtaking(self._line, self._settings.max_overtaken_s)
        self._wake_s: float | None = None

    def receive(self, event: Event, now: float) -> None:
        """Note an event. Raises `IllegalEventError`, and changes nothing, if it cannot be."""
        self._places.receive(event, now)

    def schedule(self, now: float) -> list[Decision]:
        """Return what is to be done now: ends first, since they make room, then one cohort."""
        assert now >= self._places.now, (now, self._places.now)
        self._places.now = now
        self._wake_s = None
        self._places.shed(self._line.expired(now), "its time is over")
        if self.retry_after_s() is not None:
            self._places.shed(self._line.speculative(), "the line is full")
        for session in self._leases.ended(now):
            self._room.release(session)
        decisions, self._places.due = self._places.due, []
        cohort = self._cohort(now)
        if cohort:
            decisions.append(Dispatch(tuple(step.id for step in cohort)))
        decisions += self._places.due
        self._places.due = []
        if prewarm := self._prewarm(now):
            decisions.append(prewarm)
        return decisions

    def _prewarm(self, now: float) -> Prewarm | None:
        """Return a prewarm if the engine has nothing else to do."""
        self._touches.next_look_s = None
        if not self._settings.prewarm or self._places.engine or self._touches.under_way:
            return None
        room = self._room.watermark - self._room.working_set
        return self._touches.prewarm(self._leases.acting(), room, now)

    def _cohort(self, now: float) -> list[Step]:
        """Dispatch every waiting step that may go; shared prefixes adjacent."""
        cohort = self._passes(now)
        if not self._places.engine and len(self._line) and not self._touches.is_refreshing:
            candidates = [step for step, _ in self._candidates(now)]
            waiting = [s for s in candidates if not self._touches.is_prewarming(s.session)]
            idle = self._room.worth_yielding(waiting, now)
            if idle is None and waiting:
                self._wake_s = now + RECONSIDER_S
            elif idle and not self._must_wait_for_touch(idle):
                cohort = [self._places.dispatch(idle, now), *self._passes(now)]
        return sorted(cohort, key=lambda step: (step.kind, step.ready.path[0].id))

    def _passes(self, now: float) -> list[Step]:
        """Go through the line until nothing goes: what goes may bring blocks that others share."""
        cohort: list[Step] = []
        while found := self._pass(now):
            cohort += found
        return cohort

    def _pass(self, now: float) -> list[Step]:
        """Go through the line once, in order; return what has been dispatched."""
        cohort: list[Step] = []
        refused: dict[Kind, tuple[int, int]] = {}
        for step, is_due in self._candidates(now):
            if self._seats() <= 0:
                break
            if self._touches.is_prewarming(step.session) or not self._engine_takes(step):
                if is_due:
                    break
                continue
            size = self._room.size(step)
            is_in_order = step.ready.deadline_s is None and not is_due
            if is_in_order and _is_larger(size, refused.get(step.kind)):
                continue
            if not self._room.fits(step, now, is_due=is_due):
                refused[step.kind] = size
                if is_due:
                    break
                continue
            if self._must_wait_for_touch(step):
                break
            cohort.append(self._places.dispatch(step, now))
        return cohort

    def _candidates(self, now: float) -> list[tuple[Step, bool]]:
        """Return waiting steps in order, each with whether it is due; see the head of this file."""
        steps = self._line.first(self._settings.lookahead)
        aged, is_due = self._overtaking.aged(now)
        if aged is None:
            return [(step, False) for step in steps]
        found = [(s, False) for s in steps if s.session.admitted is not None and s is not aged]
        found.insert(0 if is_due else len(found), (aged, is_due))
        return found

    def _seats(self) -> int:
        return self._room.capacity.max_num_seqs + 1 - len(self._places.engine)

    def _engine_takes(self, step: Step) -> bool:
        """Whether the engine's own queue stays shallow with this step."""
        if not self._places.uncomputed:
            return True
        uncomputed = step.ready.prompt_tokens - self._places.kv.cached_tokens(step.session.chain)
        return self._places.uncomputed + uncomputed <= self._room.capacity.prefill_tokens

    def _must_wait_for_touch(self, step: Step) -> bool:
        """Whether a kept session must be touched before this step allocates; orders that."""
        if not self._settings.refresh:
            return False
        if self._touches.is_refreshing:
            return True
        blocks = self._room.missing(step)
        session = self._touches.at_risk(self._places.sessions, step.session, blocks)
        if session and not self._touches.under_way:
            self._places.due.append(self._touches.refresh(session))
        return session is not None

    def next_wake(self, now: float) -> float | None:
        """Return when time alone may change what is to be done, or None if it cannot."""
        times = [
            self._line.next_expiry(),
            self._wake_s,
            self._overtaking.next_change_s(),
            self._touches.next_look_s,
        ]
        later = [time for time in times if time is not None and time > now]
        return min(later, default=None)

    def retry_after_s(self) -> float | None:
        """Return None if a step of a new session would be taken, else when to ask again."""
        capacity = self._room.capacity
        kv_tokens = capacity.num_blocks * capacity.block_size
        if self._line.queued_tokens <= self._settings.max_queued_kv * kv_tokens:
            return None
        return min(60.0, max(1.0, self._places.rate.prefill_s(self._line.queued_tokens)))

    def start_window(self) -> int:
        """Return how many steps of new sessions the service may hold at once."""
        return self._places.new_in_engine + self._settings.max_waiting

    def place_in_line(self, step_id: str) -> int | None:
        """Return how many ready steps go before this one, or None if it is not waiting."""
        return self._line.place(step_id)

    def counts(self) -> tuple[int, int]:
        """Return the number of steps that are (ready, in the engine)."""
        return len(self._line), len(self._places.engine)

    def view(self, now: float) -> SchedulerView:
        """Return a snapshot for people."""
        ready, running = self.counts()
        sessions = self._places.sessions.values()
        return SchedulerView(
            ready=ready,
            running=running,
            acting=len(self._places.away),
            cold=sum(1 for session in sessions if not self._places.kv.cached_tokens(session.chain)),
            admitted=sum(1 for session in sessions if session.admitted is not None),
            kept=len(self._leases),
            working_set=self._room.working_set,
            watermark=self._room.watermark,
            cold_room=round(self._places.admission.cold_blocks),
            num_blocks=self._room.capacity.num_blocks,
            disagreements=self._places.disagreements,
            disagreement_tokens=self._places.disagreement_tokens,
            yielded=self._room.yielded,
            prewarm_hits=self._touches.prewarm_hits,
            leases=tuple(
                lease_view(
                    session,
                    self._places.kv,
                    self._leases.remaining_s(session, now, is_view=True),
                    now,
                )
                for session in self._leases.acting()
            ),
            gaps=self._places.gaps.views(now),
        )

    def check_integrity(self) -> None:
        """Assert the invariants that hold between two calls."""
        self._places.check_integrity()


def _is_larger(size: tuple[int, int], refused: tuple[int, int] | None) -> bool:
    """Whether a step is at least as large as one that did not fit: then it does not fit either.

    Steps of one kind are asked in the order of admission, so ever less may give way to them.
    """
    return refused is not None and size[0] >= refused[0] and size[1] >= refused[1]
