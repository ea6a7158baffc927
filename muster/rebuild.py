"""The projections made anew: from what is archived, and what the server still holds."""

from __future__ import annotations

from temporalio.client import Client

from contracts.message import Frozen
from muster.archiver import Archiver
from store.archive import HistoryArchive
from store.database import Database
from store.projection import Projections

PAGE_JOBS = 500
"""Ids of jobs read at once."""


class Rebuilt(Frozen):
    """What a rebuild did."""

    archived_runs: int
    """Closed runs that the server held and the archive did not."""
    jobs: int
    turns: int
    dropped_jobs: int
    """Jobs whose rows are gone, since no history stands behind them."""


async def rebuild(client: Client, database: Database) -> Rebuilt:
    """Make the rows of all jobs anew; raises RPCError or UnavailableError.

    One job at a time, each in one transaction: a reader sees a job's old rows or its new ones.
    Archivers may go on meanwhile.
    """
    archiver = Archiver(client, database)
    archived = await archiver.collect()
    archive, jobs, turns, after = HistoryArchive(database), 0, 0, ""
    while job_ids := await archive.job_ids(after=after, limit=PAGE_JOBS):
        for job_id in job_ids:
            turns += await archiver.fold_again(job_id)
        jobs += len(job_ids)
        after = job_ids[-1]
    dropped = await Projections(database).drop_unarchived()
    return Rebuilt(archived_runs=archived.runs, jobs=jobs, turns=turns, dropped_jobs=dropped)
