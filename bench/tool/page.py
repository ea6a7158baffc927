"""A tool whose result has the size that its call asks for."""

from __future__ import annotations

import random


def page(number: int, size: int) -> str:
    """Return page `number` of a made-up book, `size` bytes of text.

    Args:
        number: Which page.
        size: How long it is, in bytes.
    """
    source = random.Random(number)
    return source.randbytes(-(-size // 2)).hex()[:size]
