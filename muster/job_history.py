"""A job's whole history: the runs that the server holds, the earlier ones from the archive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from contracts.error import BadInputError, MusterError
from contracts.llm_step import Usage
from contracts.message import Message
from muster.history import Run
from muster.job_error import explained, is_no_job, refusal
from muster.job_id import check_job_id
from muster.report import JobReport, build_report

if TYPE_CHECKING:  # commands that need no database load no part of SQLAlchemy
    from muster.past import Past

MAX_RUNS = 1_000
"""Runs of one job that a report reads: the latest."""


@dataclass(frozen=True, slots=True)
class JobHistory:
    """The runs of a job, oldest first (at least one); `pending` tells the open activities."""

    job_id: str
    runs: Sequence[Run]
    pending: Sequence[PendingActivityInfo] = ()
    read_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def report(self, ledger: Mapping[str, Usage]) -> JobReport:
        """Return the job's report; `ledger` has the tokens of its steps by their ids."""
        return build_report(
            self.job_id,
            [run.events for run in self.runs],
            now=self.read_at,
            pending=self.pending,
            ledger=ledger,
        )


class JobHistories:
    """Reads the histories of jobs; without a `past`, only those that the server still has."""

    def __init__(self, client: Client, past: Past | None) -> None:
        self._client = client
        self._past = past

    async def read(self, job_id: str) -> JobHistory:
        """Return a job's history as it is now; raises BadInputError if there is no such job.

        Where the server has dropped the earlier runs of a job, and the archive lacks them or does
        not answer, the history begins later.
        """
        handle = self._client.get_workflow_handle(check_job_id(job_id))
        pending: Sequence[PendingActivityInfo] = ()
        try:
            described = await handle.describe()
            last = await self._live(job_id, described.run_id)
            pending = described.raw_description.pending_activities
        except RPCError as error:
            if not is_no_job(error):
                raise refusal(error) from error
            archived = await self._past.last_run(job_id) if self._past else None
            if archived is None:
                with explained(job_id):
                    raise
            last = archived
        runs = [last]
        while (previous := runs[-1].previous_run_id) and len(runs) < MAX_RUNS:
            run = await self._earlier(job_id, previous)
            if run is None:
                break
            runs.append(run)
        return JobHistory(job_id, runs[::-1], pending)

    async def report(self, job_id: str) -> JobReport:
        """Return a job's report, from its history as it is now."""
        history = await self.read(job_id)
        report = history.report({})
        if self._past and any(row.step and row.step.time is None for row in report.rows):
            with suppress(MusterError):  # the report says by itself that it is a lower bound
                report = history.report(await self._past.usage(job_id))
        return report

    async def conversation(self, head: str) -> list[Message]:
        """Return a stored conversation; raises BadInputError if no database is known."""
        if self._past is None:
            raise BadInputError(
                "the conversation stands in the database, and no database is known",
                hint="start the stack with `muster up`, or set MUSTER_DATABASE_URL",
            )
        return await self._past.conversation(head)

    async def text(self, digest: str) -> str | None:
        """Return a text that the store keeps apart; None if it has none of that name."""
        return await self._past.text(digest) if self._past else None

    async def _live(self, job_id: str, run_id: str) -> Run:
        """Return a run as the server has it; raises RPCError."""
        handle = self._client.get_workflow_handle(job_id, run_id=run_id)
        return Run(run_id, (await handle.fetch_history()).events)

    async def _earlier(self, job_id: str, run_id: str) -> Run | None:
        try:
            return await self._live(job_id, run_id)
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise refusal(error) from error
        if self._past is None:
            return None
        with suppress(MusterError):
            return await self._past.run(job_id, run_id)
        return None
