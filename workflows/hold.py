"""Where a job stands still for people: for approval of a call, or because it is paused.

What waits here holds nothing: no activity, and so no worker slot and no engine seat. Once nothing
else goes on in the job, the inference service is told, so that it gives up what it keeps cached.
A wait ends early when the job is to roll over: the next run takes it up again. Times at which it
ends are absolute, so they hold over runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from enum import Enum, auto

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from contracts.llm_step import SessionState
    from workflows import decision
    from workflows.state import JobState
    from workflows.stepping import Stepper


class Release(Enum):
    """Why a wait has ended."""

    OVER = auto()
    EXPIRED = auto()
    ROLL_OVER = auto()


class Hold:
    """Waits for people, and knows when a job does nothing else.

    `time_left` returns the wall time that is left, or raises `OutOfTimeError`; a wait ends once
    `is_rolling_over` says so. `say` tells people in one line what the job does.
    """

    def __init__(
        self,
        state: JobState,
        stepper: Stepper,
        *,
        time_left: Callable[[], timedelta],
        is_rolling_over: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._state = state
        self._stepper = stepper
        self._time_left = time_left
        self._is_rolling_over = is_rolling_over
        self._say = say
        self._parts = 1
        self._held = 0
        self._since: datetime | None = None
        self._before = ""
        self._hint: asyncio.Task[None] | None = None

    def split(self, parts: int) -> None:
        """Begin to count `parts` of the job that go on side by side; none is held."""
        self._parts, self._held = parts, 0
        self._look()

    def begin_part(self) -> None:
        """Count one part more, which is not held."""
        self._parts += 1
        self._look()

    def end_part(self) -> None:
        """Count one part less."""
        self._parts -= 1
        self._look()

    async def unpaused(self) -> bool:
        """Wait while the job is paused; False if what comes next is left to the next run."""
        while self._state.paused:
            if await self.wait(lambda: self._state.paused is None) is Release.ROLL_OVER:
                return False
        return True

    async def wait(
        self, is_over: Callable[[], bool], *, expires_at: datetime | None = None
    ) -> Release:
        """Wait until `is_over`; raises `OutOfTimeError` when the job's wall time ends first."""
        if is_over():
            return Release.OVER
        self._held += 1
        self._look()
        release = await self._released(is_over, expires_at)
        self._held -= 1
        self._look()
        return release

    async def _released(self, is_over: Callable[[], bool], expires_at: datetime | None) -> Release:
        while not is_over():
            if self._is_rolling_over():
                return Release.ROLL_OVER
            left = self._time_left()
            if expires_at is not None:
                to_expiry = expires_at - workflow.now()
                if to_expiry <= timedelta(0):
                    return Release.EXPIRED
                left = min(left, to_expiry)
            try:
                await workflow.wait_condition(
                    lambda: is_over() or self._is_rolling_over(),
                    timeout=left,
                    timeout_summary="people decide until then",
                )
            except TimeoutError:
                continue
        return Release.OVER

    async def settle(self) -> None:
        """Wait until nothing of this runs, as it must be before a job rolls over."""
        if self._hint is not None:
            await self._hint
            self._hint = None

    def tell(self) -> None:
        """Tell what the job waits for, after people have changed it."""
        doing = decision.doing(workflow.info().workflow_id, self._state)
        self._say(doing if doing and self._since is not None else self._state.doing)

    def _look(self) -> None:
        """See whether the job waits for people alone, and tell when that changes."""
        is_idle = self._held > 0 and self._held == self._parts
        if is_idle and self._since is None:
            self._since = workflow.now()
            self._before = self._state.doing
            self._say(decision.doing(workflow.info().workflow_id, self._state))
            if self._state.is_out and not self._state.is_idle:
                self._state.is_idle = True
                self._hint = asyncio.create_task(self._stepper.hint(SessionState.WAITING))
        elif not is_idle and self._since is not None:
            self._state.waited_s += (workflow.now() - self._since).total_seconds()
            self._since = None
            self._say(self._before)
