"""The archive: the histories of closed runs, kept after the server has dropped them.

A history is Temporal's `History` message, gzip-compressed and cut into chunks: one field of
PostgreSQL holds at most 1 GB, and neither side should hold a large history whole to send it.

What writes a job's runs or its projections takes the job's lock first, for its transaction: so the
archiver and a rebuild may meet on a job, and each sees what the other has committed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from store.database import Database
from store.schema import histories, history_chunks

CHUNK_BYTES = 8_000_000
"""Of one stored chunk, compressed."""

_SPACE = 0x6D75_7374
"""First half of the keys of jobs' locks ("must" in ASCII)."""


@dataclass(frozen=True, slots=True)
class ArchivedRun:
    """One closed run: what the archive knows of it beside its history.

    `previous_run_id` is the run that continued as this one; `bytes` counts the history as
    protobuf, uncompressed; `status` is how it closed, in Temporal's words.
    """

    job_id: str
    run_id: str
    previous_run_id: str | None
    started_at: datetime
    closed_at: datetime
    status: str
    events: int
    bytes: int


_run = histories.c
_COLUMNS = [histories.c[name] for name in ArchivedRun.__dataclass_fields__]
_RUNS_OF_JOB = sa.select(*_COLUMNS).where(_run.job_id == sa.bindparam("at_job"))
_PUT_RUN = insert(histories).on_conflict_do_nothing()
_PUT_CHUNK = insert(history_chunks).on_conflict_do_nothing()
_READ_CHUNKS = (
    sa.select(history_chunks.c.body)
    .where(
        (history_chunks.c.job_id == sa.bindparam("at_job"))
        & (history_chunks.c.run_id == sa.bindparam("at_run"))
    )
    .order_by(history_chunks.c.number)
)
_PRESENT = sa.select(_run.job_id, _run.run_id).where(
    sa.tuple_(_run.job_id, _run.run_id).in_(sa.bindparam("pairs", expanding=True))
)
_JOB_IDS = (
    sa.select(_run.job_id)
    .distinct()
    .where(_run.job_id > sa.bindparam("after"))
    .order_by(_run.job_id)
    .limit(sa.bindparam("at_most"))
)
_LOCK_JOB = sa.select(
    sa.func.pg_advisory_xact_lock(_SPACE, sa.func.hashtext(sa.bindparam("at_job", type_=sa.Text)))
)


async def lock_job(connection: AsyncConnection, job_id: str) -> None:
    """Wait until no other transaction writes what the archive holds of a job."""
    await connection.execute(_LOCK_JOB, {"at_job": job_id})


async def put_chunk(
    connection: AsyncConnection, job_id: str, run_id: str, number: int, body: bytes
) -> None:
    """Store the chunk `number` (from 0) of a run that `put_run` stores in the same transaction."""
    row = {"job_id": job_id, "run_id": run_id, "number": number, "body": body}
    await connection.execute(_PUT_CHUNK, row)


async def put_run(connection: AsyncConnection, run: ArchivedRun) -> None:
    """Store what is known of a run whose chunks are stored."""
    await connection.execute(_PUT_RUN, asdict(run))


async def runs_of(connection: AsyncConnection, job_id: str) -> list[ArchivedRun]:
    """Return every archived run of a job, in no order."""
    rows = await connection.execute(_RUNS_OF_JOB, {"at_job": job_id})
    return [ArchivedRun(**row._mapping) for row in rows]


async def chunks_of(connection: AsyncConnection, job_id: str, run_id: str) -> list[bytes]:
    """Return a run's history in its chunks; an empty list if it is not archived."""
    rows = await connection.execute(_READ_CHUNKS, {"at_job": job_id, "at_run": run_id})
    return [row.body for row in rows]


def run_chain(runs: Collection[ArchivedRun]) -> list[ArchivedRun]:
    """Return the runs that led to the one that closed last, oldest first.

    Runs that are not among them are those from which somebody has reset the job: what they did
    after that point no longer counts.
    """
    by_id = {run.run_id: run for run in runs}
    run = max(runs, key=lambda run: (run.closed_at, run.run_id), default=None)
    found: list[ArchivedRun] = []
    while run is not None:
        found.append(run)
        del by_id[run.run_id]
        run = by_id.get(run.previous_run_id or "")
    return found[::-1]


class HistoryArchive:
    """Reads the archive."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def absent(self, runs: Collection[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return those of the runs (job id, run id) that are not archived, in the given order."""
        if not runs:
            return []
        rows = await self._database.fetch(_PRESENT, {"pairs": list(runs)})
        present = {(row.job_id, row.run_id) for row in rows}
        return [run for run in runs if run not in present]

    async def runs(self, job_id: str) -> list[ArchivedRun]:
        """Return a job's archived runs as `run_chain` orders them; empty if there is none."""
        return run_chain(
            await self._database.transact(lambda connection: runs_of(connection, job_id))
        )

    async def chunks(self, job_id: str, run_id: str) -> list[bytes]:
        """Return a run's history in its chunks; an empty list if it is not archived."""
        return await self._database.transact(
            lambda connection: chunks_of(connection, job_id, run_id)
        )

    async def all_job_ids(self) -> set[str]:
        """Return the ids of all jobs of which a history is kept."""
        rows = await self._database.fetch(sa.select(histories.c.job_id).distinct())
        return {row.job_id for row in rows}

    async def job_ids(self, *, after: str, limit: int) -> list[str]:
        """Return the next ids of archived jobs, in order."""
        rows = await self._database.fetch(_JOB_IDS, {"after": after, "at_most": limit})
        return [row.job_id for row in rows]
