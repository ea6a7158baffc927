"""PostgreSQL databases: a few pooled connections for each, one statement in one transaction a call.

What keeps a reading call from writing, whatever the model's SQL says:

1. Each call is a transaction that begins READ ONLY, and takes its snapshot before the statement:
   from then on PostgreSQL refuses to make it READ WRITE.
2. The statement goes by the extended protocol, which takes one statement only. So none follows a
   `COMMIT` or a `SET`, and the transaction is rolled back.
3. Between two calls `DISCARD ALL` drops what a session keeps: roles, settings, locks, temporary
   tables.

What a role may do that is no write of the database (read a server's file, end another session) is
for its grants to say.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

import asyncpg
from asyncpg.transaction import Transaction
from pydantic import JsonValue

from activities.kind.query import Query, StatementError, Table, numbered
from contracts.error import BadInputError, UnavailableError

MAX_CONNECTIONS = 4
"""Connections that one worker has to one database as one role; further calls wait."""

MAX_IDLE_S = 30.0
"""After which an unused connection is closed."""

CONNECT_TIMEOUT_S = 10.0
"""For one new connection."""

MAX_POOLS = 64
"""Databases that one worker knows; those without a connection are forgotten first."""

MAX_BATCH = 256
"""Rows asked for at a time; the first batches are smaller, since rows may be large."""

SERVER_SHARE = 0.95
"""Of a call's time, what the server may use: it ends the statement before we end the call."""

_PASSING = (
    asyncpg.CannotConnectNowError,
    asyncpg.ConnectionDoesNotExistError,
    asyncpg.DeadlockDetectedError,
    asyncpg.InsufficientResourcesError,
    asyncpg.LockNotAvailableError,
    asyncpg.OperatorInterventionError,
    asyncpg.PostgresConnectionError,
    asyncpg.PostgresSystemError,
    asyncpg.SerializationError,
)
_WRONG_LOGIN = (
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
)


class PostgresPools:
    """The databases that this worker asks, each by its URL."""

    def __init__(self) -> None:
        self._pools: dict[str, asyncpg.Pool] = {}

    async def close(self) -> None:
        """Close every connection."""
        pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.terminate()

    async def ask(self, dsn: str, place: str, query: Query) -> dict[str, JsonValue]:
        """Return what a database answers; `place` names it in errors.

        Raises StatementError, UnavailableError or BadInputError.
        """
        try:
            pool = await self._pool(dsn)
            async with pool.acquire() as connection:
                return await _run(connection, query)
        except asyncpg.QueryCanceledError:
            raise StatementError(
                f"the statement took longer than {query.timeout_s * SERVER_SHARE:g} s"
            ) from None
        except _WRONG_LOGIN as error:
            raise BadInputError(
                f"tool {query.tool!r}: {place} refuses the connection: {error}",
                hint="look at user, password and database in the tool's `url`",
            ) from None
        except _PASSING as error:
            raise UnavailableError(f"{place}: {error}") from None
        except (asyncpg.InternalClientError, asyncpg.PostgresError) as error:
            raise StatementError(_words(error)) from None
        except asyncpg.InterfaceError as error:
            raise _interface_failure(place, error) from None
        except (OSError, TimeoutError) as error:
            reason = str(error) or "no connection in time"
            raise UnavailableError(f"{place} cannot be reached: {reason}") from None
        except ValueError as error:  # an option in the URL that asyncpg does not know
            if isinstance(error, StatementError):
                raise
            raise BadInputError(f"tool {query.tool!r}: its `url` is not valid: {error}") from None

    async def _pool(self, dsn: str) -> asyncpg.Pool:
        found = self._pools.get(dsn)
        if found is None:
            if len(self._pools) >= MAX_POOLS:
                await self._forget_unused()
            found = asyncpg.create_pool(
                dsn,
                min_size=0,
                max_size=MAX_CONNECTIONS,
                max_inactive_connection_lifetime=MAX_IDLE_S,
                timeout=CONNECT_TIMEOUT_S,
                reset=_forget,
                # Nothing is kept in a session, so a pooler that hands sessions on is no problem.
                statement_cache_size=0,
                server_settings={"application_name": "muster-tool"},
            )
            self._pools[dsn] = found
        return await found

    async def _forget_unused(self) -> None:
        for dsn in [dsn for dsn, pool in self._pools.items() if not pool.get_size()]:
            await self._pools.pop(dsn).close()


async def _forget(connection: asyncpg.Connection) -> None:
    await connection.execute("discard all")


async def _run(connection: asyncpg.Connection, query: Query) -> dict[str, JsonValue]:
    transaction: Transaction = connection.transaction(readonly=query.is_read_only)
    await transaction.start()
    try:
        found = await _answer(connection, query)
    except BaseException:
        await _end(connection, transaction.rollback)
        raise
    await _end(connection, transaction.rollback if query.is_read_only else transaction.commit)
    return found


async def _end(connection: asyncpg.Connection, end: Callable[[], Awaitable[None]]) -> None:
    """End a transaction, if the statement has not ended it itself."""
    if not connection.is_closed() and connection.is_in_transaction():
        await end()


async def _answer(connection: asyncpg.Connection, query: Query) -> dict[str, JsonValue]:
    limit_ms = max(int(query.timeout_s * SERVER_SHARE * 1000), 1)
    # As a query, it takes the snapshot too.
    await connection.fetchval("select set_config('statement_timeout', $1, true)", str(limit_ms))
    text, names = numbered(query.statement) if query.is_template else (query.statement, [])
    statement = await connection.prepare(text)
    types = [each.name for each in statement.get_parameters()]
    values = [_value(query, name, kind) for name, kind in zip(names, types, strict=True)]
    attributes = statement.get_attributes()
    if not attributes:
        await statement.fetch(*values)
        return {"rows_affected": _count(statement.get_statusmsg())}
    names = [each.name for each in attributes]
    table = Table(names, query.max_rows, query.max_bytes, query.scrub)
    json_places = {n for n, each in enumerate(attributes) if each.type.name in ("json", "jsonb")}
    cursor = await statement.cursor(*values)
    batch = 1
    while not table.is_full:
        rows = await cursor.fetch(min(batch, query.max_rows + 1))
        for row in rows:
            table.add([_parsed(v) if n in json_places else v for n, v in enumerate(row)])
        if len(rows) < min(batch, query.max_rows + 1):
            break
        batch = min(2 * batch, MAX_BATCH)
    return table.result()


def _parsed(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _count(status: str | None) -> int:
    """Return the number at the end of `INSERT 0 3`."""
    last = (status or "").rpartition(" ")[2]
    return int(last) if last.isdigit() else 0


def _value(query: Query, name: str, kind: str) -> Any:
    """Return an argument as the driver takes it for a parameter of that type."""
    value = query.values[name]
    convert = _CONVERT.get(kind, _as_it_is)
    try:
        return None if value is None else convert(value)
    except (ValueError, TypeError, ArithmeticError):
        raise StatementError(f"{name}: {str(value)[:200]!r} is no {kind}") from None


def _as_it_is(value: Any) -> Any:
    return value


def _integer(value: Any) -> int:
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(value)
    return int(value)


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (bool, dict, list)) else str(value)


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    return {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}[
        str(value).lower()
    ]


def _moment(value: Any) -> datetime:
    return datetime.fromisoformat(str(value))


_CONVERT: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("int2", "int4", "int8", "oid"), _integer),
    **dict.fromkeys(("float4", "float8"), float),
    **dict.fromkeys(("text", "varchar", "bpchar", "name", "uuid", "citext", "inet"), _text),
    **dict.fromkeys(("timestamp", "timestamptz"), _moment),
    **dict.fromkeys(("json", "jsonb"), json.dumps),
    "numeric": lambda value: Decimal(str(value)),
    "bool": _truth,
    "date": lambda value: date.fromisoformat(str(value)),
    "time": lambda value: time.fromisoformat(str(value)),
}


def _words(error: Exception) -> str:
    """Return PostgreSQL's message, with where it points to and what it advises."""
    text = str(getattr(error, "message", "") or error)
    if position := getattr(error, "position", None):
        text += f" (at character {position})"
    for more in (getattr(error, "detail", None), getattr(error, "hint", None)):
        text += f"; {more}" if more else ""
    return text


def _interface_failure(place: str, error: asyncpg.InterfaceError) -> Exception:
    """Return whose fault an error of the driver's own is: a lost connection, or wrong values."""
    if isinstance(error, ValueError):  # it could not write an argument as the parameter's type
        return StatementError(str(error))
    return UnavailableError(f"{place}: {error}")
