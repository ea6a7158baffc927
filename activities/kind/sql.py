"""Databases as tools: the model writes SQL, or gives the parameters of one statement."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pydantic import JsonValue
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from activities.kind.json_schema import check_arguments
from activities.kind.postgres import PostgresPools
from activities.kind.query import IDEMPOTENCY_KEY, Query, parameter_names
from activities.kind.sqlite import ask_sqlite
from activities.secret import REFERENCE, Secrets
from activities.tool import LoadedTool, ServedTool
from contracts.agent import ToolRef, ToolSchema
from contracts.error import BadInputError
from contracts.tool_source import SqlDatabase

SQL = "sql"
"""The one argument of a tool whose SQL the model writes."""

_NAMES = {"postgresql": "PostgreSQL", "postgres": "PostgreSQL", "sqlite": "SQLite"}
"""Databases by the scheme of their URL, without its driver."""

_VALUE: dict[str, JsonValue] = {
    "anyOf": [{"type": kind} for kind in ("string", "number", "boolean", "null")]
}


class SqlTools:
    """Asks databases; keeps a few connections to those of PostgreSQL."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._pools = PostgresPools()

    async def describe(self, ref: ToolRef) -> Sequence[ServedTool]:
        """Return the one tool; raises BadInputError if its URL names no database we can ask."""
        assert ref.sql is not None
        return [ServedTool(_schema(ref, ref.sql, self._url(ref, ref.sql)))]

    async def load(self, ref: ToolRef) -> LoadedTool:
        """Return the tool; the database is asked when it is called."""
        assert ref.sql is not None
        database = ref.sql
        url = self._url(ref, database)
        schema = _schema(ref, database, url)

        def bind(given: Mapping[str, JsonValue], key: str) -> Callable[[], Awaitable[Any]]:
            check_arguments(ref.tool_name, schema.arguments, given)
            query = Query(
                tool=ref.tool_name,
                statement=database.statement or str(given[SQL]),
                is_template=database.statement is not None,
                values=_values(database.statement, given, key),
                is_read_only=database.read_only,
                max_rows=database.max_rows,
                max_bytes=ref.max_result_bytes,
                timeout_s=ref.timeout.total_seconds(),
                scrub=self._secrets.scrub,
            )
            return lambda: self._ask(url, query)

        return LoadedTool(ref.tool_name, True, bind)

    async def close(self) -> None:
        """Close the connections."""
        await self._pools.close()

    async def _ask(self, url: URL, query: Query) -> dict[str, JsonValue]:
        if url.drivername == "sqlite":
            return await ask_sqlite(url.database or "", query)
        host = url.host or url.query.get("host") or "localhost"
        place = f"PostgreSQL database {url.database or url.username or ''!s} at {host}"
        return await self._pools.ask(url.render_as_string(hide_password=False), place, query)

    def _url(self, ref: ToolRef, database: SqlDatabase) -> URL:
        """Return the URL with values for its references, each within its own part."""
        reveal, name = self._secrets.reveal, ref.shown
        whole = database.url
        if REFERENCE.match(whole):  # all of it, or at least its beginning
            whole = reveal(name, whole)
        try:
            url = make_url(whole)
        except (ArgumentError, ValueError):
            raise _bad_url(ref) from None
        scheme = url.drivername.partition("+")[0]
        if scheme not in _NAMES or (scheme == "sqlite" and url.database in (None, "", ":memory:")):
            raise _bad_url(ref)

        def part(value: str | None) -> str | None:
            return None if value is None else reveal(name, value)

        query = {
            key: reveal(name, value) if isinstance(value, str) else value
            for key, value in url.query.items()
        }
        return URL.create(
            "sqlite" if scheme == "sqlite" else "postgresql",
            username=part(url.username),
            password=part(url.password),
            host=part(url.host),
            port=url.port,
            database=part(url.database),
            query=query,
        )


def _bad_url(ref: ToolRef) -> BadInputError:
    return BadInputError(
        f"tool {ref.shown!r}: its `url` names no database that can be asked",
        hint="write postgresql://USER:${env:PASSWORD}@HOST/DATABASE or sqlite:////PATH/FILE.db",
    )


def _schema(ref: ToolRef, database: SqlDatabase, url: URL) -> ToolSchema:
    name = _NAMES[url.drivername]
    properties: dict[str, JsonValue]
    if database.statement is None:
        may = "Reading only" if database.read_only else "It may write"
        bounds = f"{name}, one statement; {may}; at most {database.max_rows:,} rows come back."
        description = f"{database.description.rstrip()} ({bounds})"
        properties = {SQL: {"type": "string", "description": f"One statement of {name}'s SQL"}}
    else:
        description = database.description
        names = parameter_names(database.statement)
        properties = {each: _VALUE for each in names if each != IDEMPOTENCY_KEY}
    arguments: dict[str, JsonValue] = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return ToolSchema(name=ref.tool_name, description=description, arguments=arguments)


def _values(
    statement: str | None, given: Mapping[str, JsonValue], key: str
) -> dict[str, JsonValue]:
    if statement is None:
        return {}
    return {
        name: key if name == IDEMPOTENCY_KEY else given[name] for name in parameter_names(statement)
    }
