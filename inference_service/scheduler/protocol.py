"""The scheduler as its shell sees it: events in, decisions out, `now` always a parameter."""

from __future__ import annotations

from typing import Protocol

from inference_service.scheduler.decision import Decision
from inference_service.scheduler.event import Event
from inference_service.scheduler.view import SchedulerView


class IllegalEventError(Exception):
    """The shell told something that cannot be so; the scheduler's state has not changed."""


class Scheduler(Protocol):
    """A scheduling policy.

    The shell calls `receive` for each event, then `schedule` once, and carries out the decisions;
    it calls `schedule` again at `next_wake`, if nothing happens before. Times are seconds of one
    monotonic clock and never decrease.
    """

    def receive(self, event: Event, now: float) -> None:
        """Note an event. Raises `IllegalEventError`, and changes nothing, if it cannot be."""
        ...

    def schedule(self, now: float) -> list[Decision]:
        """Return what is to be done now; calling it again at once returns nothing."""
        ...

    def next_wake(self, now: float) -> float | None:
        """Return when time alone may change what is to be done, or None if it cannot."""
        ...

    def retry_after_s(self) -> float | None:
        """Return None if a step of a new session would be taken, else when to ask again."""
        ...

    def start_window(self) -> int:
        """Return how many steps of new sessions the service may hold at once."""
        ...

    def place_in_line(self, step_id: str) -> int | None:
        """Return how many ready steps go before this one, or None if it is not waiting."""
        ...

    def counts(self) -> tuple[int, int]:
        """Return the number of steps that are (ready, in the engine)."""
        ...

    def view(self, now: float) -> SchedulerView:
        """Return a snapshot for people."""
        ...
