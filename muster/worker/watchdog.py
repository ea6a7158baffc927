"""End a worker process that lives but works no more, so that the supervisor starts another.

Two things make one: code that holds the event loop or the interpreter's lock and does not return
(a tool's, say), and `SystemExit` raised on the loop, after which the tasks that are left may wait
for each other for ever. Heartbeats stop in both, yet the process stays. The timer of `faulthandler`
needs neither the loop nor the lock; it writes where every thread stands to the log.
"""

from __future__ import annotations

import asyncio
import faulthandler
import sys
from collections.abc import Coroutine

LIMIT_S = 60.0
"""Twice the heartbeat timeout: what such a process had in hand has been taken from it by then."""

BEATS = 12
"""How often the timer is set back within the limit."""


async def watched(work: Coroutine[None, None, None], limit_s: float = LIMIT_S) -> None:
    """Await `work`; end the process with status 1 if its loop stands still for `limit_s` seconds.

    For a process that ends after it: the timer goes on, so that not even its end can hang.
    """
    _set_back(limit_s)
    beating = asyncio.create_task(_beat(limit_s))
    try:
        await work
    finally:
        beating.cancel()


async def _beat(limit_s: float) -> None:
    while True:
        await asyncio.sleep(limit_s / BEATS)
        _set_back(limit_s)


def _set_back(limit_s: float) -> None:
    # Not `sys.stderr`, which tools may replace.
    assert sys.__stderr__
    faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__)
