"""One question to a database and the table that comes back, bounded in rows, cells and bytes."""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

import sqlalchemy as sa
from pydantic import JsonValue
from pydantic_core import to_json
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.sql.compiler import SQLCompiler

from activities.error_map import Scrub

MAX_CELL_CHARS = 8_000
"""A longer cell is cut, with a note of what is missing."""

NOTE_BYTES = 200
"""Room kept in a result for its note that it was cut."""

MAX_EXACT_INTEGER = 2**53
"""A larger number loses digits in many JSON readers, so it becomes text."""

IDEMPOTENCY_KEY = "idempotency_key"
"""Parameter of a statement that is not an argument of the tool: the call's own id."""


class StatementError(ValueError):
    """The database refuses a statement: the text says why, and where."""


@dataclass(frozen=True, slots=True)
class Query:
    """One statement with its values, and the bounds of what may come back."""

    tool: str
    statement: str
    is_template: bool
    """Whether colons in it stand before names; the model's own SQL goes as it is."""
    values: Mapping[str, JsonValue]
    is_read_only: bool
    max_rows: int
    max_bytes: int
    timeout_s: float
    scrub: Scrub = str
    """Takes secrets out of a cell before it is cut."""


def parameter_names(statement: str) -> list[str]:
    """Return the names of the `:name` parameters of a statement, in order, each once."""
    return numbered(statement)[1]


def numbered(statement: str) -> tuple[str, list[str]]:
    """Return the statement with `$1`, `$2` … in place of its names, and those, in their order."""
    compiled = _compiled(statement, "numeric_dollar")
    return compiled.string, list(dict.fromkeys(compiled.positiontup or ()))


def named(statement: str) -> str:
    """Return the statement with its names, and without the escapes of other colons."""
    return _compiled(statement, "named").string


def _compiled(statement: str, style: Literal["named", "numeric_dollar"]) -> SQLCompiler:
    # Percent signs are doubled only for styles that use them, which these two do not.
    compiled = sa.text(statement).compile(dialect=DefaultDialect(paramstyle=style))
    assert isinstance(compiled, SQLCompiler)
    return compiled


@dataclass(slots=True)
class Table:
    """Rows as they come in, until the first bound is reached."""

    columns: Sequence[str]
    max_rows: int
    max_bytes: int
    scrub: Scrub = str
    _rows: list[list[JsonValue]] = field(default_factory=list)
    _bytes: int = 0
    _note: str = ""

    def __post_init__(self) -> None:
        """Count what stands around the rows."""
        self._bytes = _size({"columns": list(self.columns), "rows": []}) + NOTE_BYTES

    @property
    def is_full(self) -> bool:
        """Say whether a bound is reached."""
        return bool(self._note)

    def add(self, row: Sequence[Any]) -> None:
        """Take one row, unless it is one too many."""
        if self._note:
            return
        cells = [cell(value, self.scrub) for value in row]
        size = _size(cells) + 1
        if len(self._rows) == self.max_rows:
            self._note = f"there are more rows than max_rows, which is {self.max_rows:,}"
        elif self._bytes + size > self.max_bytes:
            self._note = (
                f"the rows from number {len(self._rows) + 1:,} on do not fit into "
                f"max_result_bytes, which is {self.max_bytes:,}"
            )
        else:
            self._rows.append(cells)
            self._bytes += size

    def result(self) -> dict[str, JsonValue]:
        """Return columns and rows, and what is missing if anything is."""
        found: dict[str, JsonValue] = {"columns": list(self.columns), "rows": list(self._rows)}
        if self._note:
            found["truncated"] = self._note
        return found


def cell(value: Any, scrub: Scrub = str) -> JsonValue:
    """Return a database's value as JSON: exact numbers, dates and the like as text."""
    match value:
        case None | bool():
            return value
        case int():
            return value if abs(value) <= MAX_EXACT_INTEGER else str(value)
        case float():
            return value if math.isfinite(value) else str(value)
        case str():
            return _cut(value, scrub)
        case Decimal():
            return str(value)
        case bytes() | bytearray() | memoryview():
            return _cut(base64.b64encode(bytes(value)).decode(), scrub)
        case dt.date() | dt.time():
            return value.isoformat()
        case Mapping():
            return _nested({str(key): cell(each, scrub) for key, each in value.items()}, scrub)
        case list() | tuple():
            return _nested([cell(each, scrub) for each in value], scrub)
        case _:
            return _cut(str(value), scrub)


def _nested(value: JsonValue, scrub: Scrub) -> JsonValue:
    """Return an array or an object as it is, or the beginning of its text if it is large."""
    text = json.dumps(value, ensure_ascii=False)
    return value if len(text) <= MAX_CELL_CHARS else _cut(text, scrub)


def _cut(text: str, scrub: Scrub) -> str:
    text = scrub(text) if len(text) > MAX_CELL_CHARS else text
    if len(text) > MAX_CELL_CHARS:
        text = f"{text[:MAX_CELL_CHARS]}… ({len(text) - MAX_CELL_CHARS:,} more characters)"
    return re.sub(r"[\ud800-\udfff]", "�", text)


def _size(value: Any) -> int:
    """Return how many bytes a value takes, as JSON text within JSON."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return len(to_json(text)) - len('""')
