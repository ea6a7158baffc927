"""Simple rivals of the ready-cohort scheduler, behind the same protocol.

What each does with the KV cache is what vLLM does of itself: nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from inference_service.scheduler.decision import Abort, Decision, Dispatch, Reject
from inference_service.scheduler.event import (
    CapacityChanged,
    EngineLost,
    Event,
    SessionEnded,
    StepCancelled,
    StepFailed,
    StepFinished,
    StepReady,
)
from inference_service.scheduler.protocol import IllegalEventError, Scheduler
from inference_service.scheduler.ready_cohort import ReadyCohort
from inference_service.scheduler.setting import SchedulerSettings
from inference_service.scheduler.view import SchedulerView


class Plain:
    """Everything goes to the engine at once; its own queue is first come, first served."""

    def __init__(self, capacity: CapacityChanged) -> None:
        self.capacity = capacity
        self.line: dict[str, StepReady] = {}
        self.running: dict[str, StepReady] = {}
        self._first: list[Decision] = []

    def receive(self, event: Event, now: float) -> None:
        """Note an event."""
        match event:
            case StepReady():
                self._step_ready(event)
            case StepCancelled(step_id):
                if not self.line.pop(step_id, None):
                    self._first.append(Abort(self._running(step_id).step_id))
            case StepFinished(step_id) | StepFailed(step_id):
                del self.running[self._running(step_id).step_id]
            case SessionEnded(session):
                self.session_ended(session)
            case CapacityChanged():
                self.capacity = event
            case EngineLost():
                self.running.clear()
            case _:
                pass

    def schedule(self, now: float) -> list[Decision]:
        """Dispatch, in order of readiness, each step that `may_go`."""
        decisions, self._first = self._first, []
        cohort = []
        for step in list(self.line.values()):
            if self.may_go(step):
                del self.line[step.step_id]
                self.running[step.step_id] = step
                cohort.append(step.step_id)
        if cohort:
            decisions.append(Dispatch(tuple(cohort)))
        return decisions

    def may_go(self, step: StepReady) -> bool:
        """Whether a step may go to the engine now; called just before it goes."""
        return True

    def session_ended(self, session: str) -> None:
        """Note that a session will not come back."""

    def start_window(self) -> int:
        """Return no real limit."""
        return 1_000_000

    def place_in_line(self, step_id: str) -> int | None:
        """Return how many ready steps became ready before this one."""
        places = {waiting: place for place, waiting in enumerate(self.line)}
        return places.get(step_id)

    def counts(self) -> tuple[int, int]:
        """Return the number of steps that are (ready, in the engine)."""
        return len(self.line), len(self.running)

    def next_wake(self, now: float) -> float | None:
        """Return None: time changes nothing here."""
        return None

    def retry_after_s(self) -> float | None:
        """Return None: every step is taken."""
        return None

    def view(self, now: float) -> SchedulerView:
        """Return the two counts."""
        ready, running = self.counts()
        return SchedulerView(ready=ready, running=running)

    def _step_ready(self, step: StepReady) -> None:
        if step.step_id in self.line or step.step_id in self.running:
            raise IllegalEventError(f"step {step.step_id!r} is here already")
        size = step.prompt_tokens + step.max_tokens
        cache = self.capacity.num_blocks * self.capacity.block_size
        limit = min(cache, self.capacity.max_model_len)
        if size > limit:
            self._first.append(Reject(step.step_id, "the engine", size, limit))
        else:
            self.line[step.step_id] = step

    def _running(self, step_id: str) -> StepReady:
        if step_id not in self.running:
            raise IllegalEventError(f"step {step_id!r} is not in the engine")
        return self.running[step_id]


class ContinuationFirst(Plain):
    """Everything goes to the engine at once; its own queue takes continuations before new ones."""

    def engine_priority(self, step: StepReady) -> int:
        """Return 0 for a continuation, 1 for a session's first step."""
        return int(step.is_new)


class RequestCap(Plain):
    """At most `limit` steps are in the engine, first come, first served."""

    def __init__(self, capacity: CapacityChanged, limit: int) -> None:
        super().__init__(capacity)
        self.limit = limit

    def may_go(self, step: StepReady) -> bool:
        """Whether fewer than `limit` steps are in the engine."""
        return len(self.running) < self.limit


class SessionCap(Plain):
    """At most `limit` sessions are admitted, in order of arrival; an admitted one runs to its end.

    Its steps go to the engine at once.
    """

    def __init__(self, capacity: CapacityChanged, limit: int) -> None:
        super().__init__(capacity)
        self.limit = limit
        self.admitted: set[str] = set()

    def may_go(self, step: StepReady) -> bool:
        """Whether the step's session is admitted, which happens here if there is room."""
        if step.session not in self.admitted and len(self.admitted) < self.limit:
            self.admitted.add(step.session)
        return step.session in self.admitted

    def session_ended(self, session: str) -> None:
        """Give its place to another."""
        self.admitted.discard(session)


def named_policy(name: str) -> Callable[[CapacityChanged], Scheduler]:
    """Return what makes a policy: plain, priority, requests:N, sessions:N or muster.

    "muster-refresh-yielding" is muster with these switches of its settings off.
    """
    kind, _, limit = name.partition(":")
    match kind.split("-"):
        case ["plain"]:
            return Plain
        case ["priority"]:
            return ContinuationFirst
        case ["requests"]:
            return partial(RequestCap, limit=int(limit))
        case ["sessions"]:
            return partial(SessionCap, limit=int(limit))
        case ["muster", *off]:
            switches: dict[str, Any] = dict.fromkeys(off, False)
            return partial(ReadyCohort, settings=SchedulerSettings(**switches))
        case _:
            raise ValueError(f"no policy is called {name!r}")


def is_fixed(name: str) -> bool:
    """Whether a policy of that name is a rival, neither muster nor the bound."""
    return not name.startswith(("muster", "bound"))
