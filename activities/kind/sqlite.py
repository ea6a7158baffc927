"""SQLite files: opened for each call, in a thread of its own, by rules that SQLite keeps itself.

Reading is `mode=ro` (no page can be written), `query_only`, and an authorizer that allows only what
a SELECT needs. Writing allows what changes this file's own tables; ATTACH, transactions and
pragmas stay refused, so that a call is one transaction in one file.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import JsonValue

from activities.kind.query import Query, StatementError, Table, named
from activities.thread import start_thread
from contracts.error import BadInputError, UnavailableError

MAX_VALUE_BYTES = 8_000_000
"""Largest text or blob that SQLite makes or returns."""

BUSY_TIMEOUT_S = 5.0
"""How long a call waits for another one's lock before it counts as a failed attempt."""

STEPS_PER_LOOK = 5_000
"""Instructions of SQLite between two looks at the clock: well below a millisecond."""

STOP_TIMEOUT_S = 2.0
"""How long a cancelled call waits for its thread, which stops at the next look."""

_READS = frozenset(
    (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
)
_NEVER = frozenset(
    (
        sqlite3.SQLITE_ATTACH,
        sqlite3.SQLITE_DETACH,
        sqlite3.SQLITE_SAVEPOINT,
        sqlite3.SQLITE_TRANSACTION,
    )
)
_PRAGMAS = frozenset(
    ("foreign_key_list", "index_info", "index_list", "table_info", "table_list", "table_xinfo")
)
"""Pragmas that only tell what the tables are."""

_PASSING = frozenset((sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_IOERR))


async def ask_sqlite(path: str, query: Query) -> dict[str, JsonValue]:
    """Return what a file answers; raises StatementError, UnavailableError or BadInputError."""
    stop = threading.Event()
    asking = start_thread(lambda: _Call(path, query, stop).make(), f"sqlite {query.tool}")
    try:
        ended = await asyncio.shield(asking)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait({asking}, timeout=STOP_TIMEOUT_S)
        raise
    if ended.error is not None:
        raise ended.error
    found: dict[str, JsonValue] = ended.value
    return found


class _Call:
    """One statement on a connection of its own."""

    def __init__(self, path: str, query: Query, stop: threading.Event) -> None:
        self._path = path
        self._query = query
        self._stop = stop
        self._until = time.monotonic() + query.timeout_s

    def make(self) -> dict[str, JsonValue]:
        """Open the file, run the statement, close it."""
        try:
            with contextlib.closing(self._open()) as connection:
                return self._run(connection)
        except sqlite3.Error as error:
            raise self._failure(error) from None
        except sqlite3.Warning as error:  # several statements, before Python 3.12
            raise StatementError(str(error)) from None
        except OverflowError as error:
            raise StatementError(f"an argument is too large: {error}") from None

    def _open(self) -> sqlite3.Connection:
        if not Path(self._path).is_file():
            raise BadInputError(
                f"tool {self._query.tool!r}: there is no database file {self._path!r}",
                hint="give its absolute path, as in sqlite:////data/shop.db; a relative one is "
                "seen from where the tool worker was started",
            )
        mode = "ro" if self._query.is_read_only else "rw"
        connection = sqlite3.connect(
            f"file:{quote(str(Path(self._path).resolve()))}?mode={mode}",
            uri=True,
            timeout=min(BUSY_TIMEOUT_S, self._query.timeout_s),
            isolation_level=None,
            cached_statements=0,
        )
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.text_factory = lambda raw: raw.decode(errors="replace")
        return connection

    def _run(self, connection: sqlite3.Connection) -> dict[str, JsonValue]:
        query = self._query
        connection.execute("pragma trusted_schema = off")
        if query.is_read_only:
            connection.execute("pragma query_only = on")
        connection.execute("begin" if query.is_read_only else "begin immediate")
        connection.set_progress_handler(self._must_stop, STEPS_PER_LOOK)
        connection.set_authorizer(_reads_only if query.is_read_only else _writes_here)
        statement = named(query.statement) if query.is_template else query.statement
        cursor = connection.execute(statement, _bindable(query.values))
        columns = [each[0] for each in cursor.description or ()]
        table = Table(columns, query.max_rows, query.max_bytes, query.scrub)
        # One that writes is run to its end, however many rows come back of it.
        for row in cursor:
            table.add(row)
            if table.is_full and query.is_read_only:
                break
        changed = cursor.rowcount
        cursor.close()
        connection.set_authorizer(None)
        connection.execute("rollback" if query.is_read_only else "commit")
        return table.result() if columns else {"rows_affected": max(changed, 0)}

    def _must_stop(self) -> bool:
        return self._stop.is_set() or time.monotonic() > self._until

    def _failure(self, error: sqlite3.Error) -> Exception:
        """Return whose fault an error of SQLite is, with its own words."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_INTERRUPT:
            return StatementError(f"the statement took longer than {self._query.timeout_s:g} s")
        if code in _PASSING:
            return UnavailableError(f"{Path(self._path).name}: {error}")
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_CANTOPEN):
            return BadInputError(
                f"tool {self._query.tool!r}: {self._path!r} cannot be read: {error}",
                hint="name a file that SQLite has written and the tool worker may open",
            )
        return StatementError(str(error))


def _bindable(values: Mapping[str, JsonValue]) -> dict[str, Any]:
    return {name: value if _is_plain(value) else str(value) for name, value in values.items()}


def _is_plain(value: JsonValue) -> bool:
    return value is None or isinstance(value, (str, int, float))


def _reads_only(action: int, first: str | None, *_: str | None) -> int:
    if action in _READS or (action == sqlite3.SQLITE_PRAGMA and first in _PRAGMAS):
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _writes_here(action: int, first: str | None, *_: str | None) -> int:
    if action in _NEVER or (action == sqlite3.SQLITE_PRAGMA and first not in _PRAGMAS):
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK
