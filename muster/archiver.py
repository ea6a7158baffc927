"""The archiver: copies the histories of closed runs to the store, and folds them into projections.

Temporal is the source, and no workflow takes part: however a run closes (completed, failed,
cancelled, terminated, timed out, continued as new), visibility lists it. A sweep looks at the
closed runs, newest first, and archives those that the table `histories` lacks.

- The first sweep of a process looks at all closed runs: what closed while no archiver ran is found.
  Later ones look back to the newest close they have seen, and `LOOK_BEHIND` further, since
  visibility is eventually consistent: a run may show up later than one that closed after it. What
  is later still is found by the full sweep of every `FULL_SWEEP_EVERY`.
- A job is one transaction: its new runs and its rows, made anew from all its runs. What is killed
  between two jobs goes on with the next; doing a job twice changes nothing.
- An advisory lock lets one process sweep at a time; that is thrift, not safety.
- While Temporal or PostgreSQL is away nothing is archived, and nothing is lost: the next sweep
  finds it. A job that cannot be archived for another reason is logged and passed over; it is tried
  again as long as a sweep looks at it, and by each full sweep.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio.client import Client, WorkflowExecution, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from contracts.error import UnavailableError
from contracts.name import JOB_WORKFLOWS
from muster.archive import decode_history, export_run
from muster.job_error import AWAY
from muster.projection import fold
from store.archive import HistoryArchive, chunks_of, lock_job, run_chain, runs_of
from store.database import Database, is_lost_connection
from store.projection import Projections, put_projection
from store.step_usage import step_usage

SWEEP_EVERY = timedelta(seconds=5)
"""From the end of one sweep to the next: how long a closed run is in the server alone."""

LOOK_BEHIND = timedelta(minutes=2)
"""How much later than a newer one a closed run may appear in visibility, and be found at once."""

FULL_SWEEP_EVERY = timedelta(hours=1)
"""Every closed run is looked at this often; far more often than a server's retention ends."""

PAGE_RUNS = 500
"""Runs that one request to visibility returns."""

POOL_SIZE = 3
"""Connections of an archiver: one for its lock, one for its work, one to spare."""

_LOCK = 0x6D75_7374_6572_61
"""Key of the lock of all sweeps ("mustera" in ASCII)."""

_RUNNING = WorkflowExecutionStatus.RUNNING

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Swept:
    """What one sweep did: runs archived, jobs whose rows were made anew, jobs passed over."""

    runs: int = 0
    jobs: int = 0
    passed_over: int = 0


class Archiver:
    """Archives the closed runs of one Temporal namespace."""

    def __init__(self, client: Client, database: Database) -> None:
        self._client = client
        self._database = database
        self._archive = HistoryArchive(database)
        self._projections = Projections(database)
        self._seen_until: datetime | None = None
        """The newest close that a whole sweep has seen."""

    async def run(self) -> None:
        """Sweep until cancelled; whatever goes wrong is logged, and waited out."""
        loop = asyncio.get_running_loop()
        full_after_s = loop.time() + FULL_SWEEP_EVERY.total_seconds()
        is_away = False
        while True:
            if loop.time() >= full_after_s:
                self._seen_until = None
                full_after_s = loop.time() + FULL_SWEEP_EVERY.total_seconds()
            try:
                await self.sweep()
                if is_away:
                    log.info("archiving again")
                is_away = False
            except Exception as error:
                if not _is_outage(error):
                    log.exception("a sweep of the archiver failed")
                elif not is_away:
                    log.warning("archiving waits: %s", error)
                    is_away = True
            await asyncio.sleep(SWEEP_EVERY.total_seconds())

    async def sweep(self) -> Swept | None:
        """Archive what has closed; None, and nothing done, while another process sweeps.

        Raises RPCError or UnavailableError during an outage.
        """
        async with self._database.exclusive(_LOCK) as is_ours:
            return await self.collect() if is_ours else None

    async def collect(self) -> Swept:
        """Archive what has closed, whoever else does."""
        swept, newest = Swept(), self._seen_until
        for job_id in await self._projections.stale():
            await self._take(job_id, [], swept)
        found = self._client.list_workflows(_query(self._seen_until), page_size=PAGE_RUNS)
        while True:
            await found.fetch_next_page()
            page = [run for run in found.current_page or () if run.status is not _RUNNING]
            await self._take_page(page, swept)
            closes = [run.close_time for run in page if run.close_time]
            newest = max([*closes, newest] if newest else closes, default=None)
            if not found.next_page_token:
                break
        self._seen_until = newest
        if swept.runs:
            log.info("archived", extra={"runs": swept.runs, "jobs": swept.jobs})
        return swept

    async def fold_again(self, job_id: str) -> int:
        """Make a job's rows anew from its archived runs; return how many turns they are."""
        return await self._database.transact(lambda connection: refold(connection, job_id))

    async def _take_page(self, page: Sequence[WorkflowExecution], swept: Swept) -> None:
        absent = await self._archive.absent([(run.id, run.run_id) for run in page])
        by_job = defaultdict[str, list[str]](list)
        for job_id, run_id in absent:
            by_job[job_id].append(run_id)
        for job_id, run_ids in by_job.items():
            await self._take(job_id, run_ids, swept)

    async def _take(self, job_id: str, run_ids: Sequence[str], swept: Swept) -> None:
        """Archive the runs of a job and make its rows, in one transaction."""

        async def work(connection: AsyncConnection) -> int:
            await lock_job(connection, job_id)
            stored = {run.run_id for run in await runs_of(connection, job_id)}
            taken = 0
            for run_id in run_ids:
                if run_id not in stored:
                    taken += await self._export(connection, job_id, run_id)
            if taken or not run_ids:
                await refold(connection, job_id)
            return taken

        try:
            taken = await self._database.transact(work)
        except Exception as error:
            if _is_outage(error):
                raise
            log.exception("job cannot be archived", extra={"job_id": job_id})
            swept.passed_over += 1
            return
        swept.runs += taken
        swept.jobs += bool(taken or not run_ids)

    async def _export(self, connection: AsyncConnection, job_id: str, run_id: str) -> bool:
        """Copy one run; False if the server has dropped it since it was listed."""
        try:
            async with connection.begin_nested():
                await export_run(self._client, connection, job_id, run_id)
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
            log.debug("run is gone", extra={"job_id": job_id, "run_id": run_id})
            return False
        return True


async def refold(connection: AsyncConnection, job_id: str) -> int:
    """Make a job's rows anew, in the transaction of `connection`; return how many turns they are.

    One history at a time is in memory, with what its activities asked and answered.
    """
    await lock_job(connection, job_id)
    chain = run_chain(await runs_of(connection, job_id))
    if not chain:
        return 0
    bodies = [await chunks_of(connection, job_id, run.run_id) for run in chain]
    ledger = await step_usage(connection, job_id)
    # Megabytes of protobuf: not on the loop that serves workflow tasks.
    job, turns, calls = await asyncio.to_thread(fold, job_id, map(decode_history, bodies), ledger)
    await put_projection(connection, job, turns, calls)
    return len(turns)


def _query(seen_until: datetime | None) -> str:
    query = f"WorkflowType IN {JOB_WORKFLOWS!r} AND ExecutionStatus != 'Running'"
    if seen_until is None:
        return query
    return f"{query} AND CloseTime >= '{(seen_until - LOOK_BEHIND).isoformat()}'"


def _is_outage(error: Exception) -> bool:
    if isinstance(error, RPCError):
        return error.status in (*AWAY, RPCStatusCode.RESOURCE_EXHAUSTED)
    return isinstance(error, UnavailableError) or is_lost_connection(error)
