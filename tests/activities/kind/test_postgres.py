"""PostgreSQL: what comes back, what the server itself refuses, and whose fault an error is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import asyncpg
import pytest

from activities.error_map import FailureKind, classify
from activities.kind.postgres import MAX_CONNECTIONS
from activities.kind.query import StatementError
from activities.kind.sql import SqlTools
from contracts.agent import ToolRef
from contracts.error import BadInputError, UnavailableError
from muster.stack.port import free_port
from tests.activities.kind.asking import ask, database, tools

__all__ = ["tools"]

DEADLINE_S = 20.0


@pytest.fixture
async def server(empty_database_url: str) -> AsyncIterator[asyncpg.Connection]:
    """Return a connection of the owner's, to look at what has happened."""
    connection = await asyncpg.connect(empty_database_url)
    await connection.execute(
        "create table fruit (name text, cents int, price numeric, at timestamptz, id uuid,"
        " raw bytea, tags text[], more jsonb);"
        "insert into fruit values ('apple', 30, 0.30, '2026-01-02 03:04:05+00',"
        " '00000000-0000-0000-0000-000000000001', '\\x00ff', '{red,\"a b\"}', '{\"kg\": [1, 2.5]}')"
    )
    yield connection
    await connection.close()


@pytest.fixture
def url(server: asyncpg.Connection, empty_database_url: str) -> str:
    return empty_database_url


async def fruits(server: asyncpg.Connection) -> int:
    found: int = await server.fetchval("select count(*) from fruit")
    return found


async def test_types_that_are_not_json_become_text(tools: SqlTools, url: str) -> None:
    found = await ask(
        tools, database(url), sql="select *, interval '90 min', 'nan'::float from fruit"
    )
    assert found["columns"][:3] == ["name", "cents", "price"]
    assert found["rows"] == [
        [
            "apple",
            30,
            "0.30",
            "2026-01-02T03:04:05+00:00",
            "00000000-0000-0000-0000-000000000001",
            "AP8=",
            ["red", "a b"],
            {"kg": [1, 2.5]},
            "1:30:00",
            "nan",
        ]
    ]


@pytest.mark.parametrize(
    ("test", "value"),
    [
        ("cents = :x", 30),
        ("cents = :x", "30"),
        ("cents = :x", 30.0),
        ("price = :x", 0.3),
        ("price = :x", "0.30"),
        ("name = :x", "apple"),
        ("at::date = :x", "2026-01-02"),
        ("at = :x", "2026-01-02T03:04:05Z"),
        ("id = :x", "00000000-0000-0000-0000-000000000001"),
        ("(cents > 1) = :x", "true"),
        ("(cents > 1) = :x and :x", True),
    ],
)
async def test_arguments_are_read_as_the_types_of_the_statement(
    tools: SqlTools, url: str, test: str, value: Any
) -> None:
    ref = database(url, statement=f"select count(*) from fruit where {test}")
    assert (await ask(tools, ref, x=value))["rows"] == [[1]]


async def test_argument_of_another_type_is_the_models_fault(tools: SqlTools, url: str) -> None:
    ref = database(url, statement="select 1 from fruit where cents = :most")
    for value in ("many", 1.5, 2**40, "x"):
        with pytest.raises(StatementError) as caught:
            await ask(tools, ref, most=value)
        assert classify(caught.value).kind is FailureKind.MODEL


READ_ONLY = (
    "insert into fruit (name) values ('x')",
    "insert into fruit (name) values ('x') returning name",
    "with x as (delete from fruit returning 1) select * from x",
    "drop table fruit",
    "create table other (x int)",
    "truncate fruit",
    "select nextval('numbers')",
    "do $$ begin set transaction read write; delete from fruit; end $$",
    "do $$ begin perform set_config('transaction_read_only', 'off', true);"
    " delete from fruit; end $$",
    "do $$ begin commit; delete from fruit; end $$",
    "select set_config('transaction_read_only', 'off', true)",
    "set transaction read write",
    "commit; delete from fruit",
    "rollback; begin; delete from fruit; commit",
    "select 1; select 2",
    "copy fruit from stdin",
    "select lo_create(0)",
)


@pytest.mark.parametrize("sql", READ_ONLY)
async def test_reading_cannot_be_undone_by_sql(
    tools: SqlTools, url: str, server: asyncpg.Connection, sql: str
) -> None:
    await server.execute("create sequence numbers")
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises((StatementError, UnavailableError)):
            await ask(tools, database(url, timeout=5), sql=sql)
        assert await fruits(server) == 1
        assert (await ask(tools, database(url), sql="select 1"))["rows"] == [[1]]


@pytest.mark.parametrize(
    "sql",
    [
        "commit",
        "rollback",
        "begin read write",
        "set default_transaction_read_only = off",
        "set session characteristics as transaction read write",
        "select set_config('default_transaction_read_only', 'off', false)",
        "set role pg_read_all_data",
        "listen something",
        "select pg_advisory_lock(7)",
        "create temp table t as select 1",
        "prepare p as delete from fruit",
    ],
)
async def test_what_a_call_leaves_in_its_session_is_gone_for_the_next(
    tools: SqlTools, url: str, server: asyncpg.Connection, sql: str
) -> None:
    with contextlib.suppress(StatementError):
        await ask(tools, database(url), sql=sql)
    with pytest.raises(StatementError, match="read-only transaction"):
        await ask(tools, database(url), sql="delete from fruit")
    assert await fruits(server) == 1
    owner = await server.fetchval("select current_user")
    assert (await ask(tools, database(url), sql="select current_user"))["rows"] == [[owner]]
    assert await server.fetchval("select pg_try_advisory_lock(7)")


async def test_role_decides_what_it_may_see(
    tools: SqlTools, url: str, server: asyncpg.Connection
) -> None:
    await server.execute("create role guest login; create schema hidden; create table hidden.x ()")
    try:
        guest = _as(url, "guest")
        with pytest.raises(StatementError, match="permission denied"):
            await ask(tools, database(guest), sql="select * from hidden.x")
        for sql in ("select pg_read_file('/etc/hostname')", "copy (select 1) to program 'cat'"):
            with pytest.raises(StatementError, match="permission denied"):
                await ask(tools, database(guest), sql=sql)
    finally:
        await tools.close()
        await server.execute("drop role guest")


def _as(url: str, user: str) -> str:
    from sqlalchemy.engine import make_url

    return make_url(url).set(username=user).render_as_string(hide_password=False)


async def test_ten_million_rows_do_not_come_over(tools: SqlTools, url: str) -> None:
    every = "select i from generate_series(1, 10000000) i"
    found = await ask(tools, database(url, max_rows=300), sql=every)
    assert found["rows"] == [[n] for n in range(1, 301)]
    assert "max_rows, which is 300" in found["truncated"]
    all_of_them = await ask(tools, database(url, max_rows=300), sql=f"{every} limit 300")
    assert "truncated" not in all_of_them
    large = await ask(
        tools,
        database(url, max_rows=10_000),
        sql="select repeat('x', 7000) from generate_series(1, 9999)",
    )
    assert len(large["rows"]) == 36
    assert "max_result_bytes, which is 256,000" in large["truncated"]


async def running(server: asyncpg.Connection) -> int:
    found: int = await server.fetchval(
        "select count(*) from pg_stat_activity where application_name = 'muster-tool'"
        " and state = 'active'"
    )
    return found


async def until_running(server: asyncpg.Connection, number: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await running(server) != number:
            await asyncio.sleep(0.01)


async def test_slow_statement_is_ended_by_the_server(
    tools: SqlTools, url: str, server: asyncpg.Connection
) -> None:
    with pytest.raises(StatementError, match="took longer than"):
        await ask(tools, database(url, timeout=0.4), sql="select pg_sleep(600)")
    assert await running(server) == 0


async def test_cancelled_call_cancels_its_query(
    tools: SqlTools, url: str, server: asyncpg.Connection
) -> None:
    asking = asyncio.create_task(ask(tools, database(url), sql="select pg_sleep(600)"))
    await until_running(server, 1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until_running(server, 0)


async def test_connections_are_few_and_further_calls_wait(
    tools: SqlTools, url: str, server: asyncpg.Connection
) -> None:
    ref = database(url, statement="select pg_sleep(0.1)")
    await asyncio.gather(*(ask(tools, ref) for _ in range(5 * MAX_CONNECTIONS)))
    held = "select count(*) from pg_stat_activity where application_name = 'muster-tool'"
    assert 1 <= await server.fetchval(held) <= MAX_CONNECTIONS
    await tools.close()
    async with asyncio.timeout(DEADLINE_S):
        while await server.fetchval(held):
            await asyncio.sleep(0.01)


async def test_call_that_writes_is_one_transaction_with_its_key(
    tools: SqlTools, url: str, server: asyncpg.Connection
) -> None:
    await server.execute("create unique index on fruit (name)")
    statement = (
        "insert into fruit (name, cents) values (:idempotency_key, :cents)"
        " on conflict (name) do nothing"
    )
    ref = database(url, statement=statement, read_only=False)
    assert await ask(tools, ref, "job-1/b/1/0", cents=5) == {"rows_affected": 1}
    assert await ask(tools, ref, "job-1/b/1/0", cents=5) == {"rows_affected": 0}
    assert await fruits(server) == 2
    broken = database(url, statement="insert into fruit (cents) select 1 / (3 - i) from"
                      " generate_series(1, 3) i", read_only=False)  # fmt: skip
    with pytest.raises(StatementError, match="division by zero"):
        await ask(tools, broken)
    assert await fruits(server) == 2


async def test_error_text_says_what_and_where(tools: SqlTools, url: str) -> None:
    with pytest.raises(StatementError) as caught:
        await ask(tools, database(url), sql="select weight from fruit")
    assert str(caught.value) == 'column "weight" does not exist (at character 8)'
    assert classify(caught.value).kind is FailureKind.MODEL


async def test_lost_connection_passes_and_the_next_call_has_another(
    tools: SqlTools, url: str, server: asyncpg.Connection
) -> None:
    asking = asyncio.create_task(ask(tools, database(url), sql="select pg_sleep(600)"))
    await until_running(server, 1)
    await server.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where application_name = 'muster-tool'"
    )
    with pytest.raises(UnavailableError):
        await asking
    assert (await ask(tools, database(url), sql="select 1"))["rows"] == [[1]]


async def test_server_that_is_away_may_come_back(tools: SqlTools) -> None:
    away = database(f"postgresql://me@127.0.0.1:{free_port()}/shop")
    with pytest.raises(UnavailableError, match=r"shop at 127\.0\.0\.1 cannot be reached"):
        await ask(tools, away, sql="select 1")


async def test_too_many_connections_may_pass(
    tools: SqlTools, url: str, server: asyncpg.Connection
) -> None:
    await server.execute("create role narrow login connection limit 0")
    try:
        with pytest.raises(UnavailableError, match="too many connections"):
            await ask(tools, database(_as(url, "narrow")), sql="select 1")
    finally:
        await server.execute("drop role narrow")


@pytest.mark.parametrize("user", ["nobody_of_that_name", "someone"])
async def test_wrong_login_is_permanent(tools: SqlTools, url: str, user: str) -> None:
    ref: ToolRef = database(_as(url, user))
    with pytest.raises(BadInputError, match="refuses the connection"):
        await ask(tools, ref, sql="select 1")


async def test_secret_in_a_url_may_have_any_characters(
    tools: SqlTools, url: str, server: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_PASSWORD", "p@ss:/w?rd#%")
    with_password = url.replace("@", ":${env:SHOP_PASSWORD}@", 1)
    assert quote("p@ss") not in with_password
    found = await ask(tools, database(with_password), sql="select count(*) from fruit")
    assert found["rows"] == [[1]]
