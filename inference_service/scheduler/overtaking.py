"""How long a waiting step may be overtaken.

One that sessions which came later have overtaken for half of the bound is a barrier: no new session
is admitted before it. After the other half it is due: leases give way to it.
"""

from __future__ import annotations

from inference_service.scheduler.line import Line
from inference_service.scheduler.session import Step


class Overtaking:
    """Watches the step of a line that has been overtaken longest."""

    def __init__(self, line: Line, max_overtaken_s: float) -> None:
        self._line = line
        self._half_s = max_overtaken_s / 2
        self._barrier: tuple[Step, float] | None = None

    def aged(self, now: float) -> tuple[Step | None, bool]:
        """Return the step that is a barrier now, if any, and whether it is due."""
        oldest = self._line.oldest_overtaken()
        if oldest is None or now < oldest[1] + self._half_s:
            self._barrier = None
            return None, False
        step = oldest[0]
        if self._barrier is None or self._barrier[0] is not step:
            self._barrier = (step, now)
        return step, now >= self._barrier[1] + self._half_s

    def next_change_s(self) -> float | None:
        """Return when a step becomes a barrier or due, if nothing else happens before."""
        oldest = self._line.oldest_overtaken()
        if oldest is None:
            return None
        is_barrier = self._barrier is not None and self._barrier[0] is oldest[0]
        since_s = self._barrier[1] if self._barrier and is_barrier else oldest[1]
        return since_s + self._half_s
