"""Durations as people write and read them: `30s`, `5m`, `1h30m`, `250ms`, seconds, or ISO 8601."""

from __future__ import annotations

import re
from datetime import timedelta

from pydantic import TypeAdapter

_UNIT_S = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|d|h|m|s)\s*", re.ASCII)
_ISO_8601 = TypeAdapter(timedelta)
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)

MAX_DURATION = timedelta(days=366)
"""No wait that an agent names may be longer than a year."""


def parse_duration(text: str) -> timedelta:
    """Return the duration that `text` names; a bare number is seconds.

    Raises `ValueError` if it is not a duration, not above zero, or above `MAX_DURATION`. Units go
    from large to small and each at most once, so `5m1h` is refused.
    """
    stripped = text.strip()
    if _NUMBER.fullmatch(stripped):
        seconds = float(stripped)
    elif stripped.startswith("P"):
        seconds = _ISO_8601.validate_python(stripped).total_seconds()
    else:
        seconds = _sum_of_parts(stripped)
    if not 0 < seconds <= MAX_DURATION.total_seconds():
        raise ValueError(text)
    return timedelta(seconds=seconds)


def _sum_of_parts(text: str) -> float:
    seconds, at, last_unit_s = 0.0, 0, float("inf")
    while at < len(text):
        part = _PART.match(text, at)
        if part is None or _UNIT_S[part[2]] >= last_unit_s:
            raise ValueError(text)
        last_unit_s = _UNIT_S[part[2]]
        seconds += float(part[1]) * last_unit_s
        at = part.end()
    return seconds


def show_duration(seconds: float) -> str:
    """Return a short text for a duration: `8 ms`, `1.25 s`, `3m 05s`, `2h 10m`, `3d 04h`."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3_600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3_600}h {whole % 3_600 // 60:02d}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3_600:02d}h"
