"""`muster gc`: what Temporal lists is kept; without its answer nothing is counted or deleted."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from temporalio.client import Client

from contracts.message import Message, Role
from muster.kept_job import kept_job_ids
from muster.stack.port import free_port
from store.context import ContextStore
from store.database import Database
from tests.cli.stage import CommandLine, Stage
from tests.cli.test_jobs import start
from tests.stack.new_namespace import new_namespace
from tests.workflows.peer import says

TABLES = ("contexts", "blobs", "token_runs", "step_ledger", "tool_ledger")
NOTHING = {table: {"rows": 0, "bytes": 0} for table in TABLES}


@pytest.fixture
async def store(database: Database) -> ContextStore:
    """A store of a test's own."""
    return ContextStore(database)


def _opening(job_id: str) -> Message:
    return Message(role=Role.SYSTEM, content=f"Of {job_id}.")


async def _open(store: ContextStore, job_id: str) -> None:
    await store.open(job_id, [_opening(job_id)], [job_id])


async def _grow_old(database: Database) -> None:
    for table in ("contexts", "blobs"):
        await database.execute(
            sa.text(f"UPDATE {table} SET created_at = now() - interval '3 days'"), {}
        )


async def test_what_no_listed_job_reaches_is_counted_then_deleted(
    stage: Stage, muster: CommandLine, database: Database, database_url: str, store: ContextStore
) -> None:
    job_id = await start(stage, says("a coat"))
    await stage.jobs.wait(job_id)
    while job_id not in await kept_job_ids(stage.client):
        pass  # each look is a call to the server
    await _open(store, job_id)
    await _open(store, "job-gone")
    await _grow_old(database)
    await _open(store, "job-new")

    async def gc(*options: str) -> dict[str, object]:
        done = await muster.run("gc", "--json", *options, MUSTER_DATABASE_URL=database_url)
        assert done.status == 0, done
        assert done.json["kept_jobs"] >= 1
        tables: dict[str, object] = done.json["tables"]
        return tables

    garbage = {
        **NOTHING,
        "contexts": {"rows": 1, "bytes": len(_opening("job-gone").model_dump_json())},
        "blobs": {"rows": 1, "bytes": len('["job-gone"]')},
    }
    assert await gc("--grace", "7d") == NOTHING
    assert await gc() == garbage
    assert await gc("--delete") == garbage
    assert await gc() == NOTHING
    shown = await muster.run("gc", MUSTER_DATABASE_URL=database_url)
    assert "contexts" in shown.out and "muster gc --delete" in shown.out


async def test_without_temporals_answer_nothing_is_deleted(
    muster: CommandLine, database: Database, database_url: str, store: ContextStore
) -> None:
    await _open(store, "job-1")
    await _grow_old(database)
    error = await muster.refused(
        "gc",
        "--delete",
        MUSTER_DATABASE_URL=database_url,
        MUSTER_TEMPORAL_ADDRESS=f"127.0.0.1:{free_port()}",
    )
    assert "no Temporal server answers" in error
    assert len(await database.fetch(sa.text("SELECT hash FROM contexts"))) == 1


async def test_a_namespace_without_jobs_is_refused(
    muster: CommandLine, temporal_address: str, database_url: str
) -> None:
    empty: Client = await new_namespace(temporal_address, "empty")
    error = await muster.refused(
        "gc", MUSTER_DATABASE_URL=database_url, MUSTER_TEMPORAL_NAMESPACE=empty.namespace
    )
    assert f"namespace '{empty.namespace}' lists no job" in error


@pytest.mark.parametrize(
    ("grace", "text"),
    [("1h", "1:00:00 is too short, the limit is 2:00:00"), ("soon", "no duration")],
)
async def test_a_bad_grace_time_is_refused(
    stage: Stage, muster: CommandLine, database_url: str, grace: str, text: str
) -> None:
    await stage.jobs.wait(await start(stage, says("a coat")))
    error = await muster.refused("gc", "--grace", grace, MUSTER_DATABASE_URL=database_url)
    assert text in error
