"""Migrations make exactly the tables in code, and a database that lacks them is told so."""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy.ext.asyncio import create_async_engine

from contracts.error import BadInputError, UnavailableError
from store.database import Database, parse_url
from store.migrate import upgrade
from store.revision import alembic_config
from store.schema import metadata

ROOT = Path(__file__).parents[2]
CATALOG = """
SELECT 'column', table_name, column_name,
       concat_ws(' ', data_type, is_nullable, column_default, collation_name)
FROM information_schema.columns WHERE table_schema = 'public'
UNION ALL SELECT 'index', tablename, indexname, indexdef FROM pg_indexes
WHERE schemaname = 'public'
UNION ALL SELECT 'constraint', conrelid::regclass::text, conname, pg_get_constraintdef(oid)
FROM pg_constraint WHERE connamespace = 'public'::regnamespace
UNION ALL SELECT 'comment', relname, '', obj_description(oid) FROM pg_class
WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'
ORDER BY 1, 2, 3
"""


async def _catalog(url: str) -> list[tuple[Any, ...]]:
    engine = create_async_engine(parse_url(url))
    async with engine.connect() as connection:
        rows = (await connection.execute(sa.text(CATALOG))).all()
    await engine.dispose()
    return [tuple(row) for row in rows if row[1] != "alembic_version"]


async def test_empty_database_after_all_migrations_equals_the_tables_in_code(
    database_url: str, empty_database_url: str
) -> None:
    engine = create_async_engine(parse_url(empty_database_url))
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await engine.dispose()

    migrated = await _catalog(database_url)

    assert migrated == await _catalog(empty_database_url)
    assert {row[1] for row in migrated} == set(metadata.tables)


async def test_autogenerate_finds_nothing_to_migrate(database: Database) -> None:
    async with database.engine.connect() as connection:
        difference = await connection.run_sync(
            lambda sync: compare_metadata(
                MigrationContext.configure(sync, opts={"compare_server_default": True}), metadata
            )
        )
    assert difference == []


async def test_database_without_migrations_is_a_clear_error(empty_database_url: str) -> None:
    database = Database(empty_database_url)
    with pytest.raises(BadInputError, match="at migration 'none', this version needs") as caught:
        await database.check()
    assert "alembic upgrade head" in caught.value.hint
    await database.close()


async def test_upgrades_at_the_same_time_run_each_migration_once(empty_database_url: str) -> None:
    await asyncio.gather(*(upgrade(empty_database_url) for _ in range(4)))
    database = Database(empty_database_url)
    await database.check()
    await database.close()


async def test_alembics_own_command_migrates_too(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_DATABASE_URL", empty_database_url)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command_line = (sys.executable, "-m", "alembic", "-c", str(ROOT / "alembic.ini"))
    process = await asyncio.create_subprocess_exec(*command_line, "upgrade", "head")
    assert await process.wait() == 0
    database = Database(empty_database_url)
    await database.check()
    await database.close()


async def test_database_newer_than_the_code_is_accepted(database: Database) -> None:
    async with database.engine.begin() as connection:
        await connection.execute(sa.text("UPDATE alembic_version SET version_num = 'later'"))
    await database.check()


async def test_every_migration_can_be_taken_back(database: Database) -> None:
    async with database.engine.begin() as connection:
        await connection.run_sync(lambda sync: command.downgrade(alembic_config(sync), "base"))
    names = await database.fetch(
        sa.text("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    )
    assert [row.tablename for row in names] == ["alembic_version"]


async def test_content_of_jobs_opened_before_openings_were_on_record_is_kept(
    empty_database_url: str,
) -> None:
    await upgrade(empty_database_url, "0002")
    database = Database(empty_database_url)
    head = "c" * 64
    result = f'{{"step_id":"s","outcome":"finished","context":{{"head":"{head}","token_run":"s"}}}}'
    for statement in (
        "INSERT INTO contexts (hash, parent, body) VALUES ('a', NULL, ''), ('b', 'a', ''),"
        f" ('{head}', 'a', '')",
        "INSERT INTO blobs (digest, body) VALUES ('toolset', '[]')",
        "INSERT INTO step_ledger (step_id, epoch, job_id, model, digest, replica, task_token,"
        f" outcome, result) VALUES ('s', 1, 'job', 'm', 'd', 'r', '', 'finished', '{result}')",
    ):
        await database.execute(sa.text(statement.replace(":", "\\:")), {})
    await upgrade(empty_database_url)
    rows = await database.fetch(sa.text("SELECT head FROM step_ledger"))
    assert [row.head for row in rows] == [head]
    kept = await database.fetch(
        sa.text(
            "SELECT hash AS name FROM contexts WHERE created_at = 'infinity'"
            " UNION ALL SELECT digest FROM blobs WHERE created_at = 'infinity'"
        )
    )
    assert {row.name for row in kept} == {"b", "toolset"}, "an opening without a step; a toolset"
    await database.close()


async def test_server_that_does_not_answer_is_unavailable_with_a_hint(tmp_path: Any) -> None:
    database = Database(
        f"postgresql://postgres:secret@/muster?host={tmp_path}", patience=timedelta(0)
    )
    with pytest.raises(UnavailableError, match="does not answer") as caught:
        await database.check()
    assert "muster up" in caught.value.hint
    assert "secret" not in str(caught.value)
    await database.close()


async def test_database_that_does_not_exist_is_bad_input(database_url: str) -> None:
    url = parse_url(database_url).set(drivername="postgresql", database="nowhere")
    database = Database(url.render_as_string(hide_password=False))
    with pytest.raises(BadInputError, match='database "nowhere" does not exist'):
        await database.check()
    await database.close()


@pytest.mark.parametrize("url", ["mysql://localhost/x", "not a url", ""])
def test_url_of_another_kind_is_bad_input(url: str) -> None:
    with pytest.raises(BadInputError, match="database URL") as caught:
        Database(url)
    assert caught.value.hint.startswith("postgresql://")
