"""Log lines of every process: time, level, process, logger, message, then key=value pairs.

Processes write to standard error; the supervisor gives each its own file and bounds its size.
"""

from __future__ import annotations

import json
import logging
import sys
import time

_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"}
_QUIET = ("httpx", "httpcore", "asyncio", "alembic")


class LineFormatter(logging.Formatter):
    """Format one record as one readable line (its traceback, if any, follows it)."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {process} %(name)s: %(message)s")

    def formatTime(  # noqa: N802 - logging's name
        self, record: logging.LogRecord, datefmt: str | None = None
    ) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return f"{seconds}.{int(record.msecs):03d}Z"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        pairs = [
            f"{key}={_value(value)}"
            for key, value in vars(record).items()
            if key not in _STANDARD and not key.startswith("temporal_") and not key.startswith("__")
        ]
        return " ".join([super().formatMessage(record), *pairs])


def configure(process: str, level: str) -> None:
    """Write this process's log lines to standard error; `process` names it in each line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(process))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)


def _value(value: object) -> str:
    if isinstance(value, (int, float)):
        return str(value)
    text = str(value)
    return json.dumps(text) if not text or any(char in text for char in ' "=\n') else text
