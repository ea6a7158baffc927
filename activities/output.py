"""Bound what one tool call may print: the log must survive a tool that prints megabytes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
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
def bounded_output() -> Iterator[None]:
    """Enforce the bound on `sys.stdout` and `sys.stderr`; for a process that runs tools."""
    plain = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_Bounded(stream) for stream in plain)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = plain


class _Bounded:
    """A text stream that drops what a tool call prints beyond its budget."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text; say once that the rest is dropped."""
        budget = _budget.get()
        if budget is None:
            return self._stream.write(text)
        if budget.left > 0:
            self._stream.write(text[: budget.left])
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
