"""First come, first served, with a shallow engine queue.

Theory of operation. A step is in exactly one place: the line (READY), the engine before its first
token (PREFILL), the engine after it (DECODE), or gone.

    StepReady         -> READY, at the end of the line; or gone by Reject, if it can never fit
    Dispatch          READY -> PREFILL
    FirstToken        PREFILL -> DECODE
    StepFinished      PREFILL | DECODE -> gone
    StepFailed        PREFILL | DECODE -> gone
    StepCancelled     READY -> gone;  PREFILL | DECODE -> Abort is ordered, gone at StepFailed
    EngineLost        PREFILL | DECODE -> gone (the shell fails those steps; a retry comes back)

The engine is given no more than its seats + 1 requests, and no more than `prefill_tokens` of
prompts it has not computed, unless it has none: order and cancellation stay here, where they cost
nothing, and the engine still never runs dry. The first of the line that does not fit blocks the
line: nothing overtakes. Whatever fits goes at once, as one cohort; nothing is held back for size.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum

from inference_service.scheduler.decision import Abort, Decision, Dispatch, Reject
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
from inference_service.scheduler.protocol import IllegalEventError
from inference_service.scheduler.view import SchedulerView


class _Place(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class FirstComeFirstServed:
    """The `Scheduler` that serves steps in the order in which they became ready."""

    def __init__(self, capacity: CapacityChanged) -> None:
        self._capacity = capacity
        self._line: OrderedDict[str, StepReady] = OrderedDict()
        self._engine: dict[str, tuple[StepReady, _Place]] = {}
        self._rejects: OrderedDict[str, Reject] = OrderedDict()
        self._aborts: OrderedDict[str, None] = OrderedDict()
        self._aborted: set[str] = set()
        self._now = float("-inf")

    def receive(self, event: Event, now: float) -> None:
        """Note an event. Raises `IllegalEventError`, and changes nothing, if it cannot be."""
        if now < self._now:
            raise IllegalEventError(f"time ran back from {self._now} to {now}")
        match event:
            case StepReady():
                self._step_ready(event)
            case StepCancelled(step_id):
                self._step_cancelled(step_id)
            case FirstToken(step_id):
                step, _ = self._dispatched(step_id)
                self._engine[step_id] = (step, _Place.DECODE)
            case StepFinished(step_id) | StepFailed(step_id):
                self._dispatched(step_id)
                self._leave_engine(step_id)
            case ToolsStarted() | SessionIdle() | SessionEnded() | GroupResolved():
                pass  # first come, first served knows steps only
            case TouchDone() | KVEvicted():
                pass
            case CapacityChanged():
                self._capacity = event
                self._reject_what_never_fits(list(self._line.values()))
            case EngineLost():
                for step_id in list(self._engine):
                    self._leave_engine(step_id)
        self._now = now

    def schedule(self, now: float) -> list[Decision]:
        """Return what is to be done now: aborts first, since they make room, then one cohort."""
        assert now >= self._now, (now, self._now)
        decisions: list[Decision] = [*self._rejects.values(), *map(Abort, self._aborts)]
        self._rejects.clear()
        self._aborted.update(self._aborts)
        self._aborts.clear()
        cohort: list[str] = []
        while self._line and self._may_go(step := next(iter(self._line.values()))):
            del self._line[step.step_id]
            self._engine[step.step_id] = (step, _Place.PREFILL)
            cohort.append(step.step_id)
        if cohort:
            decisions.append(Dispatch(tuple(cohort)))
        self.check_integrity()
        return decisions

    def start_window(self) -> int:
        """Return how many steps of new sessions the service may hold at once (at least 1).

        New work is taken only into what continuations leave of the engine, and one more.
        """
        steps = [*self._line.values(), *(step for step, _ in self._engine.values())]
        continuations = sum(not step.is_new for step in steps)
        return max(1, self._capacity.max_num_seqs + 1 - continuations)

    def place_in_line(self, step_id: str) -> int | None:
        """Return how many ready steps go before this one, or None if it is not waiting."""
        if step_id not in self._line:
            return None
        return next(place for place, waiting in enumerate(self._line) if waiting == step_id)

    def counts(self) -> tuple[int, int]:
        """Return the number of steps that are (ready, in the engine)."""
        return len(self._line), len(self._engine)

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

    def check_integrity(self) -> None:
        """Assert the invariants: one place per step, a bounded engine queue, no idle seat."""
        assert not self._line.keys() & self._engine.keys()
        assert self._aborts.keys() | self._aborted <= self._engine.keys()
        if self._line:
            first = next(iter(self._line.values()))
            assert not self._may_go(first), f"{first.step_id} may go and was not dispatched"

    def _step_ready(self, step: StepReady) -> None:
        if any(step.step_id in place for place in (self._line, self._engine, self._rejects)):
            raise IllegalEventError(f"step {step.step_id!r} is here already")
        self._line[step.step_id] = step
        self._reject_what_never_fits([step])

    def _step_cancelled(self, step_id: str) -> None:
        if self._line.pop(step_id, None) or self._rejects.pop(step_id, None):
            return
        self._dispatched(step_id)
        if step_id not in self._aborted:
            self._aborts[step_id] = None

    def _dispatched(self, step_id: str) -> tuple[StepReady, _Place]:
        try:
            return self._engine[step_id]
        except KeyError:
            raise IllegalEventError(f"step {step_id!r} is not in the engine") from None

    def _leave_engine(self, step_id: str) -> None:
        del self._engine[step_id]
        self._aborts.pop(step_id, None)
        self._aborted.discard(step_id)

    def _may_go(self, step: StepReady) -> bool:
        if len(self._engine) > self._capacity.max_num_seqs:
            return False
        prefilling = [s for s, place in self._engine.values() if place is _Place.PREFILL]
        uncomputed = sum(s.prompt_tokens - (s.cached_tokens or 0) for s in [step, *prefilling])
        return not prefilling or uncomputed <= self._capacity.prefill_tokens

    def _reject_what_never_fits(self, steps: list[StepReady]) -> None:
        limits = {
            "the model's context window": self._capacity.max_model_len,
            "the KV cache": self._capacity.num_blocks * self._capacity.block_size,
        }
        what, limit = min(limits.items(), key=lambda item: item[1])
        for step in steps:
            size = step.prompt_tokens + step.max_tokens
            if size > limit:
                del self._line[step.step_id]
                self._rejects[step.step_id] = Reject(step.step_id, what, size, limit)
