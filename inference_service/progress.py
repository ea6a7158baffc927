"""The progress watchdog: an engine that looks alive and computes nothing is as good as dead.

Progress is a token of any step, or a change of what the engine says of itself: a long prompt gives
no token for a while, but takes KV blocks with each chunk. Only steps in the engine are waited for.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta

from contracts.error import MusterError
from inference_service.dispatcher import Dispatcher
from inference_service.engine.protocol import Engine

log = logging.getLogger(__name__)

CHECKS = 8
"""Looks within one limit: a stall is found at most an eighth of it late."""


async def wait_for_stall(engine: Engine, dispatcher: Dispatcher, limit: timedelta) -> float:
    """Return once steps have been in the engine without progress for `limit`: for how long.

    `limit` must be longer than the longest engine step, one chunk of a prompt.
    """
    limit_s = limit.total_seconds()
    said: object = None
    while True:
        await asyncio.sleep(limit_s / CHECKS)
        now = dispatcher.now()
        _, in_engine = dispatcher.counts()
        saying = await _what_it_says(engine, limit_s / CHECKS)
        if in_engine == 0 or saying not in (None, said):
            said = saying
            dispatcher.engine_gave_output()
        elif now - dispatcher.last_output_s >= limit_s:
            return now - dispatcher.last_output_s


async def _what_it_says(engine: Engine, patience_s: float) -> object:
    """Return what changes while the engine computes, or None if it does not answer."""
    try:
        async with asyncio.timeout(patience_s):
            stats = await engine.stats()
    except (TimeoutError, MusterError):
        return None
    return stats.kv_cache_usage, stats.num_preemptions
