"""Run a tool so that nothing it does can hurt the worker or outlast its timeout.

Users' asynchronous tools run on a loop of their own (`tool_loop`), synchronous ones in a thread of
their own (`thread`), and so does what makes a result into text, which may call the tool's own
serialisers. The tools of servers, which are our code, run on the worker's loop. What bounds the
threads is the worker's limit on calls, and a limit on threads left behind.

Whatever a tool raises comes back as a value; `CancelledError` from a tool must not look like the
activity's own cancellation.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from activities.error_map import Scrub
from activities.result import render
from activities.thread import Ended, start_thread
from activities.tool import LoadedTool
from activities.tool_loop import ToolLoop
from contracts.error import UnavailableError

MAX_LEFT_BEHIND = 64
"""Threads of timed-out or cancelled calls that one process lets run on before it refuses more."""

STOP_GRACE_S = 5.0
"""How long a cancelled asynchronous tool may clean up before it is left to itself."""

_log = logging.getLogger(__name__)


class ToolTimeoutError(TimeoutError):
    """A tool did not return in time."""


class ToolExecution:
    """Calls tools; counts the threads whose caller has gone away."""

    def __init__(self) -> None:
        self._left_behind = 0
        self._loop = ToolLoop()

    async def call(self, tool: LoadedTool, work: Callable[[], Any], timeout_s: float) -> Ended:
        """Do the `work` that `tool.bind` returned; a timeout ends it with ToolTimeoutError.

        Being cancelled is passed on: an asynchronous tool gets `CancelledError` and a moment to
        clean up, a synchronous one runs on in its thread and its result is dropped.
        """
        return await _bounded(self._work(tool, work), tool.name, timeout_s)

    async def render(
        self, name: str, value: Any, max_bytes: int, timeout_s: float, scrub: Scrub = str
    ) -> Ended:
        """Make what the tool `name` returned into text, as `result.render` does, within a time."""
        work = self._in_thread(lambda: render(name, value, max_bytes, scrub), name)
        return await _bounded(work, name, timeout_s)

    async def _work(self, tool: LoadedTool, work: Callable[[], Any]) -> Ended:
        if tool.is_async:
            return await self._await(tool, work)
        ended = await self._in_thread(work, tool.name)
        if inspect.isawaitable(ended.value):  # a plain function that wraps an asynchronous one
            return await self._await(tool, lambda: ended.value)
        return ended

    async def _await(self, tool: LoadedTool, start: Callable[[], Awaitable[Any]]) -> Ended:
        if tool.is_foreign:
            return await self._loop.run(start, tool.name)
        return await _await(start)

    async def _in_thread(self, work: Callable[[], Any], name: str) -> Ended:
        if self._left_behind >= MAX_LEFT_BEHIND:
            message = (
                f"{self._left_behind} calls of synchronous tools still run after their timeout or "
                f"cancellation, the limit is {MAX_LEFT_BEHIND}"
            )
            hint = "give those tools timeouts of their own, then restart the tool worker"
            return Ended(error=UnavailableError(message, hint=hint))
        ended = start_thread(work, f"tool-{name}")
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            self._left_behind += 1
            ended.add_done_callback(self._came_back)
            raise

    def _came_back(self, _: asyncio.Future[Ended]) -> None:
        self._left_behind -= 1


async def _bounded(work: Coroutine[Any, Any, Ended], name: str, timeout_s: float) -> Ended:
    """Await `work` for at most `timeout_s` seconds; it is cancelled then, and if we are."""
    task = asyncio.create_task(work, name=f"tool {name}")
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        await _stop(task)
        raise
    if not done:
        await _stop(task)
        return Ended(error=ToolTimeoutError(f"no answer within {timeout_s:g} s"))
    return task.result()


async def _await(start: Callable[[], Awaitable[Any]]) -> Ended:
    try:
        return Ended(value=await start())
    except BaseException as error:
        return Ended(error=error)


async def _stop(work: asyncio.Task[Ended]) -> None:
    work.cancel()
    _, running = await asyncio.wait({work}, timeout=STOP_GRACE_S)
    if running:
        _log.error("%s ignores its cancellation and is left running", work.get_name())
