"""A loop in a thread of its own for asynchronous tools: one that blocks holds up tools only.

On the worker's loop a tool that blocks (`time.sleep` in an `async def`) would stop the heartbeats
of every call, and the worker's own talk with Temporal. Here it stops other asynchronous tools at
most: their calls still heartbeat, and still end at their timeouts.

Life of a call: it is handed to the loop (`_Job`), which begins it between two steps of what runs.
A loop that has not begun a call after `STALL_LIMIT_S` stands still: it is left to itself, with what
runs on it, and a new loop takes that call and those after it. A loop that was left ends when the
last call on it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

from activities.thread import Ended
from contracts.error import UnavailableError

STALL_LIMIT_S = 10.0
"""How long a loop may take to begin a call: a tool that keeps it longer blocks it."""

MAX_STALLED_LOOPS = 16
"""Loops left to themselves that one process lets stand before it refuses asynchronous tools."""

_log = logging.getLogger(__name__)


class ToolLoop:
    """Runs what is not ours on a loop that is not ours either; for one event loop's use."""

    def __init__(self) -> None:
        self._thread: _LoopThread | None = None
        self._stalled: list[_LoopThread] = []

    async def run(self, start: Callable[[], Awaitable[Any]], name: str) -> Ended:
        """Await what `start` returns, both on the tools' loop.

        Being cancelled cancels it there, and returns when it has ended.
        """
        while True:
            self._stalled = [each for each in self._stalled if each.thread.is_alive()]
            if len(self._stalled) >= MAX_STALLED_LOOPS:
                return Ended(error=_too_many_stalled(len(self._stalled)))
            thread = self._current()
            job = _Job(start, name, asyncio.get_running_loop())
            thread.submit(job)
            try:
                await asyncio.wait({job.begun}, timeout=STALL_LIMIT_S)
                if job.is_withdrawn():
                    self._leave(thread, name)
                    continue
                return await asyncio.shield(job.ended)
            except asyncio.CancelledError:
                if job.is_withdrawn():
                    raise
                thread.cancel(job)
                return await job.ended

    def _current(self) -> _LoopThread:
        if self._thread is None:
            self._thread = _LoopThread()
            weakref.finalize(self, self._thread.retire)
        return self._thread

    def _leave(self, thread: _LoopThread, name: str) -> None:
        """Let a loop that stands still alone; another call may have done so already."""
        if self._thread is not thread:
            return
        _log.error(
            "asynchronous tools stand still: %s; %r waited %g s and goes to a new loop",
            ", ".join(sorted(thread.names())) or "nothing known runs",
            name,
            STALL_LIMIT_S,
        )
        thread.retire()
        self._stalled.append(thread)
        self._thread = None


class _Job:
    """One call on its way: begun by the tools' loop or withdrawn by ours, whichever is first."""

    def __init__(
        self, start: Callable[[], Awaitable[Any]], name: str, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.start, self.name = start, name
        self.context = contextvars.copy_context()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[Ended] = loop.create_future()
        self.task: asyncio.Task[None] | None = None
        self._loop = loop
        self._claim = threading.Lock()

    def is_begun(self) -> bool:
        """Begin, on the tools' loop; False if it was withdrawn."""
        if not self._claim.acquire(blocking=False):
            return False
        self._tell(self.begun, None)
        return True

    def is_withdrawn(self) -> bool:
        """Withdraw, on ours; False if it has begun."""
        return self._claim.acquire(blocking=False)

    async def work(self) -> None:
        """Do it, on the tools' loop; whatever it raises is a value."""
        try:
            end = Ended(value=await self.start())
        except BaseException as error:
            end = Ended(error=error)
        self._tell(self.ended, end)

    def _tell(self, future: asyncio.Future[Any], value: object) -> None:
        def deliver() -> None:
            if not future.done():
                future.set_result(value)

        try:
            self._loop.call_soon_threadsafe(deliver)
        except RuntimeError:
            _log.debug("the worker's loop closed before %r ended", self.name)


class _LoopThread:
    """A loop that runs in a daemon thread until it is retired and idle."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._jobs: set[_Job] = set()
        self._is_retired = False
        self.thread = threading.Thread(target=self._run, name="async-tools", daemon=True)
        self.thread.start()

    def names(self) -> list[str]:
        """Return whose calls run on it."""
        return [job.name for job in tuple(self._jobs)]

    def submit(self, job: _Job) -> None:
        """Hand over a call."""
        self._tell(self._begin, job)

    def cancel(self, job: _Job) -> None:
        """Cancel a call that has begun."""
        self._tell(self._cancel, job)

    def retire(self) -> None:
        """Take no call any more: end when none runs."""
        self._tell(self._retire)

    def _tell(self, what: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # it was retired and has ended
            self._loop.call_soon_threadsafe(what, *arguments)

    def _begin(self, job: _Job) -> None:
        if not job.is_begun():
            return
        self._jobs.add(job)
        job.task = self._loop.create_task(job.work(), name=job.name, context=job.context)
        job.task.add_done_callback(lambda _: self._end(job))

    def _cancel(self, job: _Job) -> None:
        assert job.task is not None
        job.task.cancel()

    def _retire(self) -> None:
        self._is_retired = True
        self._stop_if_idle()

    def _end(self, job: _Job) -> None:
        self._jobs.discard(job)
        self._stop_if_idle()

    def _stop_if_idle(self) -> None:
        if self._is_retired and not self._jobs:
            self._loop.stop()

    def _run(self) -> None:
        while not (self._is_retired and not self._jobs):
            try:
                self._loop.run_forever()
            except BaseException as error:  # SystemExit in a task that a tool has started
                _log.error("a task of an asynchronous tool raised %s", type(error).__name__)
        self._loop.close()


def _too_many_stalled(count: int) -> UnavailableError:
    return UnavailableError(
        f"{count} loops of asynchronous tools stand still, the limit is {MAX_STALLED_LOOPS}",
        hint="a tool blocks in an `async def`: make it a plain `def`; then restart the tool worker",
    )
