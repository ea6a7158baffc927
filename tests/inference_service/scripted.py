"""A scheduler that does as a test says, and remembers what it was told."""

from __future__ import annotations

from typing import TypeVar

from inference_service.scheduler.decision import Abort, Decision, Dispatch
from inference_service.scheduler.event import (
    CapacityChanged,
    Event,
    StepCancelled,
    StepFailed,
    StepFinished,
    StepReady,
)
from inference_service.scheduler.view import SchedulerView

Kind = TypeVar("Kind")


class ScriptedScheduler:
    """Dispatches what is ready at once, unless it `holds`; decides what stands in `due`."""

    def __init__(self, capacity: CapacityChanged) -> None:
        self.capacity = capacity
        self.events: list[Event] = []
        self.due: list[Decision] = []
        self.holds = False
        self.breaks = False
        self.wake_s: float | None = None
        self.refuses_for_s: float | None = None
        self._ready: dict[str, None] = {}
        self._engine: set[str] = set()

    def told(self, kind: type[Kind]) -> list[Kind]:
        """Return the events of one kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]

    def receive(self, event: Event, now: float) -> None:
        """Remember the event."""
        self.events.append(event)
        match event:
            case StepReady(step_id):
                self._ready[step_id] = None
            case StepCancelled(step_id):
                if step_id in self._engine:
                    self.due.append(Abort(step_id))
                self._ready.pop(step_id, None)
            case StepFinished(step_id) | StepFailed(step_id):
                self._engine.discard(step_id)
            case _:
                pass

    def schedule(self, now: float) -> list[Decision]:
        """Return what is due."""
        assert not self.breaks, "broken"
        decisions, self.due = self.due, []
        if self._ready and not self.holds:
            decisions.append(Dispatch(tuple(self._ready)))
            self._engine.update(self._ready)
            self._ready.clear()
        if self.wake_s is not None and now >= self.wake_s:
            self.wake_s = None
        return decisions

    def next_wake(self, now: float) -> float | None:
        """Return what the test has set."""
        return self.wake_s

    def retry_after_s(self) -> float | None:
        """Return what the test has set."""
        return self.refuses_for_s

    def start_window(self) -> int:
        """Return one."""
        return 1

    def place_in_line(self, step_id: str) -> int | None:
        """Return the place of a step that waits."""
        return list(self._ready).index(step_id) if step_id in self._ready else None

    def counts(self) -> tuple[int, int]:
        """Return the number of steps that are (ready, in the engine)."""
        return len(self._ready), len(self._engine)

    def view(self, now: float) -> SchedulerView:
        """Return the two counts."""
        return SchedulerView(*self.counts())
