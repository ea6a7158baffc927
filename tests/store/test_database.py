"""A database that goes away and comes back costs nobody a result."""

from __future__ import annotations

import asyncio
import functools
import shutil
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
import pytest_asyncio
import sqlalchemy as sa

from contracts.error import UnavailableError
from contracts.llm_step import Usage
from muster.stack.part import start_part
from muster.stack.postgres import PostgresPart, choose_user
from store.database import Database, storable
from store.migrate import upgrade
from store.step_ledger import AlreadyFinished, AttemptOutcome, Claimed, StepLedger
from tests.store.sample import step_input, step_result, token_run

START_TIMEOUT_S = 60.0
STEP = step_input()


@pytest_asyncio.fixture
async def own_postgres(tmp_path: Path) -> AsyncIterator[PostgresPart]:
    """Return a PostgreSQL, not started, that a test may stop and start."""
    part = PostgresPart(tmp_path / "postgres", tmp_path / "postgres.log", choose_user(""))
    yield part
    shutil.rmtree(part.socket_dir, ignore_errors=True)


async def test_claim_and_commit_wait_for_a_killed_server_to_come_back(
    own_postgres: PostgresPart,
) -> None:
    child = await start_part(own_postgres, own_postgres.log, START_TIMEOUT_S)
    await upgrade(own_postgres.address)
    database = Database(own_postgres.address, patience=timedelta(seconds=60))
    ledger = StepLedger(database)
    claim = functools.partial(ledger.claim, digest="d", replica="r", task_token=b"t")
    assert await claim(step=STEP) == Claimed(1, 0, Usage())
    result, messages = step_result(STEP, 1, Usage(completion_tokens=3))
    other = step_input("job-2/b/1")

    await child.kill()
    commit = asyncio.create_task(
        ledger.commit(result, parent=None, append=messages, run=token_run(STEP, [1]))
    )
    claim_of_other = asyncio.create_task(claim(step=other))
    with pytest.raises(UnavailableError, match="does not answer"):
        await database.check()
    child = await start_part(own_postgres, own_postgres.log, START_TIMEOUT_S)

    try:
        assert await commit
        assert await claim_of_other == Claimed(1, 0, Usage())
        assert await claim(step=STEP) == AlreadyFinished(result)
        (row,) = await ledger.attempts(STEP.step_id)
        assert row.outcome is AttemptOutcome.FINISHED
    finally:
        await database.close()
        await child.stop()


async def test_server_that_stays_away_is_unavailable_when_patience_is_spent(
    tmp_path: Path,
) -> None:
    url = f"postgresql://muster@/muster?host={tmp_path}"
    database = Database(url, patience=timedelta(milliseconds=100))
    with pytest.raises(UnavailableError, match="does not answer") as caught:
        await database.fetch(sa.text("SELECT 1"))
    assert caught.value.retryable
    await database.close()


async def test_wrong_sql_is_no_outage(database: Database) -> None:
    with pytest.raises(sa.exc.ProgrammingError):
        await database.fetch(sa.text("SELECT nothing"))


async def test_more_calls_than_connections_all_get_their_turn(database_url: str) -> None:
    database = Database(database_url, pool_size=2)
    rows = await asyncio.gather(*(database.fetch(sa.text("SELECT 1 AS n")) for _ in range(50)))
    assert [row[0].n for row in rows] == [1] * 50
    await database.close()


def test_storable_text_is_cut_and_has_nothing_that_postgresql_refuses() -> None:
    assert storable("a\x00b\ud800c", 4) == "a\ufffdb?"
