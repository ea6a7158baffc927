"""SQLite files: what comes back, what is refused by SQLite itself, and whose fault an error is."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from activities.error_map import FailureKind, classify
from activities.kind.query import StatementError
from activities.kind.sql import SqlTools
from activities.tool import WrongArgumentsError
from contracts.error import BadInputError, UnavailableError
from tests.activities.kind.asking import ask, database, tools

__all__ = ["tools"]

ENDLESS = "with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my shop?.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("create table fruit (name text, cents integer, photo blob, note text)")
        rows = [
            ("apple", 30, b"\x00\xff", None),
            ("pear", 45, None, "soft"),
            ("kiwi", 60, None, ""),
        ]
        connection.executemany("insert into fruit values (?, ?, ?, ?)", rows)
    return path


def url(file: Path) -> str:
    return f"sqlite:///{str(file).replace('?', '%3F')}"


def content(file: Path) -> list[tuple[str, int]]:
    with closing(sqlite3.connect(file)) as connection:
        return connection.execute("select name, cents from fruit order by cents").fetchall()


async def test_model_writes_sql_and_reads_columns_and_rows(tools: SqlTools, file: Path) -> None:
    ref = database(url(file))
    [served] = await tools.describe(ref)
    assert list(served.schema.arguments["properties"]) == ["sql"]  # type: ignore[arg-type]
    assert "SQLite" in served.schema.description
    found = await ask(tools, ref, sql="select * from fruit where cents < 50 order by cents")
    assert found == {
        "columns": ["name", "cents", "photo", "note"],
        "rows": [["apple", 30, "AP8=", None], ["pear", 45, None, "soft"]],
    }


async def test_names_of_a_statement_are_its_arguments(tools: SqlTools, file: Path) -> None:
    statement = "select name, '12:30', '\\:x' from fruit where cents < :most and name <> :not_this"
    ref = database(url(file), statement=statement)
    [served] = await tools.describe(ref)
    assert served.schema.arguments["required"] == ["most", "not_this"]
    found = await ask(tools, ref, most=50, not_this="pear")
    assert found["rows"] == [["apple", "12:30", ":x"]]
    with pytest.raises(WrongArgumentsError, match="not_this"):
        await ask(tools, ref, most=50)


@pytest.mark.parametrize(
    "sql",
    [
        "delete from fruit",
        "insert into fruit values ('x', 1, null, null) returning name",
        "drop table fruit",
        "create temp table t (x)",
        "attach database '/tmp/elsewhere.db' as elsewhere",
        "pragma query_only = off",
        "pragma writable_schema = on",
        "commit",
        "savepoint x",
        "vacuum into '/tmp/elsewhere.db'",
        "select load_extension('libevil')",
        "select 1; delete from fruit",
        "delete from fruit; select 1",
    ],
)
async def test_reading_cannot_be_undone_by_sql(tools: SqlTools, file: Path, sql: str) -> None:
    before = file.read_bytes()  # noqa: ASYNC240 - a small file
    with pytest.raises(StatementError):
        await ask(tools, database(url(file)), sql=sql)
    assert file.read_bytes() == before  # noqa: ASYNC240 - a small file


@pytest.mark.parametrize(
    "sql",
    [
        "attach database 'elsewhere.db' as elsewhere",
        "commit",
        "pragma journal_mode = off",
        "insert into fruit values ('a', 1, null, null); drop table fruit",
    ],
)
async def test_writing_stays_one_transaction_in_one_file(
    tools: SqlTools, file: Path, sql: str
) -> None:
    with pytest.raises(StatementError):
        await ask(tools, database(url(file), read_only=False), sql=sql)
    assert len(content(file)) == 3


async def test_call_that_writes_is_kept_whole_under_its_key(tools: SqlTools, file: Path) -> None:
    statement = "insert into fruit (name, cents) values (:idempotency_key, :cents)"
    ref = database(url(file), statement=statement, read_only=False)
    [served] = await tools.describe(ref)
    assert list(served.schema.arguments["properties"]) == ["cents"]  # type: ignore[arg-type]
    assert await ask(tools, ref, "job-1/b/1/0", cents=5) == {"rows_affected": 1}
    assert content(file)[0] == ("job-1/b/1/0", 5)
    returning = database(
        url(file),
        statement="update fruit set cents = 1 returning name",
        read_only=False,
        max_rows=1,
    )
    assert "truncated" in await ask(tools, returning)
    assert [cents for _, cents in content(file)] == [1, 1, 1, 1]


async def test_rows_cells_and_bytes_are_bounded_and_it_is_said(tools: SqlTools, file: Path) -> None:
    ref = database(url(file), max_rows=2)
    found = await ask(tools, ref, sql=ENDLESS.replace("count(*)", "i"))
    assert found["rows"] == [[1], [2]]
    assert "max_rows, which is 2" in found["truncated"]
    long = await ask(tools, ref, sql="select hex(zeroblob(100000))")
    assert long["rows"][0][0].endswith("… (192,000 more characters)")
    small = database(url(file), max_result_bytes=1_000)
    cut = await ask(tools, small, sql="select hex(zeroblob(200)) from fruit")
    assert len(cut["rows"]) == 1
    assert "from number 2 on" in cut["truncated"]
    with pytest.raises(StatementError, match="too big"):
        await ask(tools, ref, sql="select zeroblob(1000000000)")


async def test_endless_statement_ends_at_the_tools_timeout(tools: SqlTools, file: Path) -> None:
    with pytest.raises(StatementError, match=r"longer than 0\.2 s"):
        await ask(tools, database(url(file), timeout=0.2), sql=ENDLESS)


async def test_cancelled_call_ends_its_thread(tools: SqlTools, file: Path) -> None:
    asking = asyncio.create_task(ask(tools, database(url(file)), sql=ENDLESS))
    await asyncio.sleep(0)
    while not any("sqlite ask" in name for name in _threads()):
        await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    async with asyncio.timeout(5):
        while any("sqlite ask" in name for name in _threads()):
            await asyncio.sleep(0.01)


def _threads() -> list[str]:
    import threading

    return [thread.name for thread in threading.enumerate()]


async def test_each_error_is_its_own_partys(tools: SqlTools, file: Path, tmp_path: Path) -> None:
    with pytest.raises(StatementError, match="no such column: weight") as models:
        await ask(tools, database(url(file)), sql="select weight from fruit")
    assert classify(models.value).kind is FailureKind.MODEL
    with pytest.raises(BadInputError, match="no database file"):
        await ask(tools, database(f"sqlite:///{tmp_path}/none.db"), sql="select 1")
    assert not (tmp_path / "none.db").exists()
    (tmp_path / "text.db").write_text("no database at all" * 100)
    with pytest.raises(BadInputError, match="not a database"):
        await ask(tools, database(f"sqlite:///{tmp_path}/text.db"), sql="select * from x")
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("begin exclusive")
        with pytest.raises(UnavailableError, match="locked"):
            await ask(tools, database(url(file), timeout=0.3), sql="select * from fruit")


@pytest.mark.parametrize("bad", ["mysql://h/db", "sqlite://", "sqlite:///:memory:", "nonsense"])
async def test_url_of_no_database_is_refused_when_a_job_opens(tools: SqlTools, bad: str) -> None:
    with pytest.raises(BadInputError, match="names no database"):
        await tools.describe(database(bad))


async def test_url_may_be_a_secret(
    tools: SqlTools, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_URL", url(file))
    found = await ask(tools, database("${env:SHOP_URL}"), sql="select count(*) from fruit")
    assert found["rows"] == [[3]]
    with pytest.raises(BadInputError, match="SHOP_GONE"):
        await tools.describe(database("postgresql://me:${env:SHOP_GONE}@localhost/shop"))
