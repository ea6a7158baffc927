"""What a process that runs tools prints and logs: bounded, and without the secrets it knows.

The log must survive a tool that prints megabytes, and may be read by people whom no key is for.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TextIO

MAX_PRINTED_CHARS = 64_000
"""Of one tool call, standard output and error together."""


@dataclass(slots=True)
class _Budget:
    tool: str
    left: int


_budget: ContextVar[_Budget | None] = ContextVar("tool_output", default=None)


@contextlib.contextmanager
def output_of(tool: str) -> Iterator[None]:
    """Count what is printed in this context, its tasks and its tool's thread, as `tool`'s."""
    token = _budget.set(_Budget(tool, MAX_PRINTED_CHARS))
    try:
        yield
    finally:
        _budget.reset(token)


@contextlib.contextmanager
def guarded_output(scrub: Callable[[str], str] = str) -> Iterator[None]:
    """Enforce the bound on `sys.stdout` and `sys.stderr`, and `scrub` them and all log lines."""
    plain = sys.stdout, sys.stderr
    handlers = [(each, each.formatter) for each in logging.getLogger().handlers]
    sys.stdout, sys.stderr = (_Guarded(stream, scrub) for stream in plain)
    for handler, formatter in handlers:
        handler.setFormatter(_Scrubbing(formatter or logging.Formatter(), scrub))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = plain
        for handler, formatter in handlers:
            handler.setFormatter(formatter)


class _Scrubbing(logging.Formatter):
    """Takes secrets out of what another formatter has made: message, values and traceback."""

    def __init__(self, plain: logging.Formatter, scrub: Callable[[str], str]) -> None:
        super().__init__()
        self._plain, self._scrub = plain, scrub

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without secrets."""
        return self._scrub(self._plain.format(record))


class _Guarded:
    """A text stream that drops secrets, and what a tool call prints beyond its budget."""

    def __init__(self, stream: TextIO, scrub: Callable[[str], str]) -> None:
        self._stream, self._scrub = stream, scrub

    def write(self, text: str) -> int:
        """Write text; say once that the rest is dropped."""
        budget = _budget.get()
        if budget is None:
            self._stream.write(self._scrub(text))
        elif budget.left > 0:
            self._stream.write(self._scrub(text)[: budget.left])
            budget.left -= len(text)
            if budget.left <= 0:
                limit = f"{MAX_PRINTED_CHARS:,} characters"
                self._stream.write(f"\n[tool {budget.tool!r} printed over {limit}: rest dropped]\n")
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write each line, as `write` does."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
