"""A tool that takes its time without using any."""

from __future__ import annotations

import asyncio


async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "waited"
