"""Run a tool's function so that nothing it does can hurt the worker or outlast its timeout.

Asynchronous tools run as a task of the worker's loop, synchronous ones in a thread of their own.
A pool will not do: a call that hangs for ever keeps its thread, later calls would queue behind it,
and leaving the program would wait for it. What bounds the threads is the worker's limit on calls,
and a limit on threads left behind.

Whatever a tool raises comes back as a value: `SystemExit` raised in a task would leave the loop,
and `CancelledError` from a tool must not look like the activity's own cancellation.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from activities.toolset import LoadedTool
from contracts.error import UnavailableError

MAX_LEFT_BEHIND = 64
"""Threads of timed-out or cancelled calls that one process lets run on before it refuses more."""

STOP_GRACE_S = 5.0
"""How long a cancelled asynchronous tool may clean up before it is left to itself."""

_log = logging.getLogger(__name__)


class ToolTimeoutError(TimeoutError):
    """A tool did not return in time."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a call of a tool's function ended: its value, or what it raised."""

    value: Any = None
    error: BaseException | None = None


class ToolExecution:
    """Calls tools' functions; counts the threads whose caller has gone away."""

    def __init__(self) -> None:
        self._left_behind = 0

    async def call(self, tool: LoadedTool, arguments: dict[str, Any], timeout_s: float) -> Ended:
        """Call a tool's function; a timeout ends it with ToolTimeoutError.

        Being cancelled is passed on: an asynchronous tool gets `CancelledError` and a moment to
        clean up, a synchronous one runs on in its thread and its result is dropped.
        """
        work = asyncio.create_task(self._work(tool, arguments), name=f"tool {tool.schema.name}")
        try:
            done, _ = await asyncio.wait({work}, timeout=timeout_s)
        except asyncio.CancelledError:
            await _stop(work)
            raise
        if not done:
            await _stop(work)
            return Ended(error=ToolTimeoutError(f"no answer within {timeout_s:g} s"))
        return work.result()

    async def _work(self, tool: LoadedTool, arguments: dict[str, Any]) -> Ended:
        if tool.is_async:
            return await _await(lambda: tool.function(**arguments))
        ended = await self._in_thread(tool, arguments)
        if inspect.isawaitable(ended.value):  # a plain function that wraps an asynchronous one
            return await _await(lambda: ended.value)
        return ended

    async def _in_thread(self, tool: LoadedTool, arguments: dict[str, Any]) -> Ended:
        if self._left_behind >= MAX_LEFT_BEHIND:
            message = (
                f"{self._left_behind} calls of synchronous tools still run after their timeout or "
                f"cancellation, the limit is {MAX_LEFT_BEHIND}"
            )
            hint = "give those tools timeouts of their own, then restart the tool worker"
            return Ended(error=UnavailableError(message, hint=hint))
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Ended] = loop.create_future()

        def deliver(ended: Ended) -> None:
            if done.cancelled():
                self._left_behind -= 1
            else:
                done.set_result(ended)

        def work() -> None:
            try:
                ended = Ended(value=tool.function(**arguments))
            except BaseException as error:
                ended = Ended(error=error)
            try:
                loop.call_soon_threadsafe(deliver, ended)
            except RuntimeError:
                _log.debug("the loop closed before tool %r returned", tool.schema.name)

        context = contextvars.copy_context()
        name = f"tool-{tool.schema.name}"
        threading.Thread(target=context.run, args=(work,), name=name, daemon=True).start()
        try:
            return await done
        except asyncio.CancelledError:
            self._left_behind += 1
            raise


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
