"""The processes' log files: what a process said last, and a bound on their size."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

MAX_LOG_BYTES = 16 * 1024**2
"""A log that grows past this starts anew; the one before is kept beside it as NAME.log.1."""

BOUND_INTERVAL_S = 5.0
TAIL_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Said:
    """The error a program of ours reported as it left, as `muster.exit` writes it."""

    message: str
    hint: str


def said_since(log: Path, offset: int) -> Said | None:
    """Return the last `error:` line, with its hint, that was written to `log` after `offset`."""
    lines = _lines_since(log, offset)
    for place in range(len(lines) - 1, -1, -1):
        if lines[place].startswith("error: "):
            after = lines[place + 1] if place + 1 < len(lines) else ""
            hint = after.removeprefix("hint: ") if after.startswith("hint: ") else ""
            return Said(lines[place].removeprefix("error: "), hint)
    return None


def last_line_since(log: Path, offset: int) -> str:
    """Return the last line that is not blank of what was written after `offset`; else ""."""
    lines = [line.strip() for line in _lines_since(log, offset)]
    return next((line for line in reversed(lines) if line), "")


def _lines_since(log: Path, offset: int) -> list[str]:
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(min(offset, size), size - TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []


def size_of(log: Path) -> int:
    """Return a log's size in bytes; 0 if there is none."""
    return log.stat().st_size if log.exists() else 0


async def keep_bounded(directory: Path) -> None:
    """Bound every log in `directory`, for ever."""
    while True:
        await asyncio.to_thread(bound, directory)
        await asyncio.sleep(BOUND_INTERVAL_S)


def bound(directory: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
    """Copy away and empty each log over `max_bytes`; writers append, so they go on at its start."""
    for log in directory.glob("*.log"):
        if size_of(log) > max_bytes:
            shutil.copyfile(log, log.with_suffix(".log.1"))
            os.truncate(log, 0)
