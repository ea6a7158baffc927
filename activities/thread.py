"""Run code that is not ours in a thread of its own: its imports, its functions, its serialisers.

The event loop's pool of threads will not do: code that hangs for ever keeps its thread, and when
the few of the pool are gone, whoever needs one next waits for ever as well. And whatever is raised
comes back as a value: `SystemExit` or `KeyboardInterrupt`, raised out of a task, ends the loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a piece of code ended: its value, or what it raised."""

    value: Any = None
    error: BaseException | None = None


def start_thread(work: Callable[[], Any], name: str) -> asyncio.Future[Ended]:
    """Start `work` in a new thread and return its future end.

    A thread cannot be stopped: cancelling the future only drops what comes out of it.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Ended] = loop.create_future()

    def deliver(end: Ended) -> None:
        if not ended.cancelled():
            ended.set_result(end)

    def run() -> None:
        try:
            end = Ended(value=work())
        except BaseException as error:
            end = Ended(error=error)
        try:
            loop.call_soon_threadsafe(deliver, end)
        except RuntimeError:
            _log.debug("the loop closed before %r ended", name)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name=name, daemon=True).start()
    return ended
