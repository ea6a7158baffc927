"""The connection to PostgreSQL: one pool, and patience while the server is away.

Every write of this package is idempotent, so an operation whose connection broke is tried again
until `patience` is spent: a server that restarts costs nobody a paid generation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from contracts.error import BadInputError, UnavailableError
from store.revision import check_revision

T = TypeVar("T")

POOL_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 10.0
COMMAND_TIMEOUT = timedelta(seconds=60)
FIRST_RETRY_S = 0.05
MAX_RETRY_S = 1.0

_UNAVAILABLE_STATES = ("08", "57P01", "57P02", "57P03", "53300")
_TRY_AGAIN_STATES = ("40001", "40P01")
_REFUSED_STATES = ("28", "3D000")


class Database:
    """One pool of connections to PostgreSQL.

    `url` is `postgresql://…` (or `postgresql+asyncpg://…`); a unix socket is `?host=/directory`.
    `patience` bounds how long one operation waits for a server that is away, `command_timeout` how
    long one statement may take.
    """

    def __init__(
        self,
        url: str,
        *,
        pool_size: int = 10,
        patience: timedelta = timedelta(seconds=30),
        command_timeout: timedelta = COMMAND_TIMEOUT,
    ) -> None:
        self._url = parse_url(url)
        self._patience_s = patience.total_seconds()
        self.engine: AsyncEngine = create_async_engine(
            self._url,
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=POOL_TIMEOUT_S,
            connect_args={
                "timeout": CONNECT_TIMEOUT_S,
                "command_timeout": command_timeout.total_seconds(),
                "server_settings": {"application_name": "muster", "jit": "off"},
            },
        )
        self._autocommit = self.engine.execution_options(isolation_level="AUTOCOMMIT")

    @property
    def address(self) -> str:
        """The address as shown to people, without its password."""
        return self._url.set(drivername="postgresql").render_as_string(hide_password=True)

    async def check(self) -> None:
        """Check that the server answers and its tables are as new as this code.

        Raises UnavailableError when it does not answer, BadInputError when it refuses us or its
        migrations are missing.
        """

        async def attempt() -> None:
            async with self.engine.connect() as connection:
                await connection.run_sync(check_revision)

        await self._with_patience(attempt, patience_s=0.0)

    async def close(self) -> None:
        """Close every connection; idempotent."""
        await self.engine.dispose()

    async def fetch(
        self, statement: sa.Executable, values: Mapping[str, Any] | None = None
    ) -> Sequence[sa.Row[Any]]:
        """Run one idempotent statement as its own transaction, in one round trip; return rows."""

        async def attempt() -> Sequence[sa.Row[Any]]:
            async with self._autocommit.connect() as connection:
                return (await connection.execute(statement, values)).all()

        return await self._with_patience(attempt)

    async def execute(self, statement: sa.Executable, values: Mapping[str, Any]) -> None:
        """Run one idempotent statement that returns no rows, as `fetch` does."""

        async def attempt() -> None:
            async with self._autocommit.connect() as connection:
                await connection.execute(statement, values)

        await self._with_patience(attempt)

    async def transact(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        """Run idempotent `work` in one transaction; it may be called again if that was lost."""

        async def attempt() -> T:
            async with self.engine.begin() as connection:
                return await work(connection)

        return await self._with_patience(attempt)

    @asynccontextmanager
    async def exclusive(self, key: int) -> AsyncIterator[bool]:
        """Hold the advisory lock `key` meanwhile; yields False, without it, if another holds it.

        It is lost with its connection: what it guards must bear to be done twice at once.
        """

        async def attempt() -> tuple[AsyncConnection, bool]:
            connection = await self._autocommit.connect()
            try:
                taken = await connection.execute(sa.select(sa.func.pg_try_advisory_lock(key)))
                return connection, bool(taken.scalar_one())
            except BaseException:
                await connection.close()
                raise

        connection, is_ours = await self._with_patience(attempt)
        try:
            yield is_ours
        finally:
            if is_ours:
                with suppress(DBAPIError):
                    await connection.execute(sa.select(sa.func.pg_advisory_unlock(key)))
            await connection.close()

    async def _with_patience(
        self, attempt: Callable[[], Awaitable[T]], *, patience_s: float | None = None
    ) -> T:
        wait_s = self._patience_s if patience_s is None else patience_s
        deadline = time.monotonic() + wait_s
        delay_s = FIRST_RETRY_S
        while True:
            try:
                return await attempt()
            except Exception as error:
                if _sql_state(error).startswith(_REFUSED_STATES):
                    raise self._refused(error) from error
                if not is_lost_connection(error):
                    raise
                if time.monotonic() + delay_s > deadline:
                    raise self._unavailable(error) from error
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_RETRY_S)

    def _refused(self, error: BaseException) -> BadInputError:
        return BadInputError(
            f"PostgreSQL at {self.address} refuses us: {_cause(error)}",
            hint="check user, password and database name in the database URL",
        )

    def _unavailable(self, error: BaseException) -> UnavailableError:
        return UnavailableError(
            f"PostgreSQL at {self.address} does not answer: {_cause(error)}",
            hint="is it running? `muster up` starts one, `muster doctor` checks every part",
        )


def parse_url(url: str) -> sa.URL:
    """Return the SQLAlchemy URL for asyncpg; raises BadInputError for anything but PostgreSQL."""
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError) as error:
        raise BadInputError(
            f"database URL is not a URL: {error}", hint="postgresql://user:password@host/database"
        ) from error
    if parsed.get_backend_name() not in ("postgresql", "postgres"):
        raise BadInputError(
            f"database URL names {parsed.get_backend_name()!r}, only PostgreSQL is supported",
            hint="postgresql://user:password@host/database",
        )
    return parsed.set(drivername="postgresql+asyncpg")


def storable(text: str, max_chars: int) -> str:
    """Return text that a PostgreSQL text column takes: cut, no NUL, no lone surrogates."""
    clean = text[:max_chars].replace("\x00", "\ufffd")
    return clean.encode("utf-8", errors="replace").decode()


def is_lost_connection(error: BaseException) -> bool:
    """Say whether the operation may succeed if tried again, as it is."""
    if isinstance(error, DBAPIError):
        state = _sql_state(error)
        return error.connection_invalidated or state.startswith(
            (*_UNAVAILABLE_STATES, *_TRY_AGAIN_STATES)
        )
    return isinstance(error, (OSError, TimeoutError, PoolTimeoutError)) or _sql_state(
        error
    ).startswith(_UNAVAILABLE_STATES)


def _sql_state(error: BaseException) -> str:
    source = error.orig if isinstance(error, DBAPIError) else error
    return str(getattr(source, "sqlstate", None) or "")


def _cause(error: BaseException) -> str:
    source = error.orig if isinstance(error, DBAPIError) and error.orig else error
    source = source.__cause__ or source
    return str(source) or type(source).__name__
