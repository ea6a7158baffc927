"""One job of a listing, and the visibility query that finds it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

from temporalio.client import WorkflowExecution, WorkflowExecutionStatus
from temporalio.common import SearchAttributeKey

from contracts.error import BadInputError
from contracts.job import JobStatus
from contracts.message import Frozen
from contracts.name import JOB_WORKFLOWS, SEARCH_AGENT, SEARCH_STATE, SEARCH_TENANT

AGENT_KEY = SearchAttributeKey.for_keyword(SEARCH_AGENT)
TENANT_KEY = SearchAttributeKey.for_keyword(SEARCH_TENANT)
STATE_KEY = SearchAttributeKey.for_keyword(SEARCH_STATE)

MAX_LISTED = 10_000
"""Jobs that one listing returns."""

_AGENT = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")

_STATUS = {
    WorkflowExecutionStatus.RUNNING: JobStatus.RUNNING,
    WorkflowExecutionStatus.CONTINUED_AS_NEW: JobStatus.RUNNING,
    WorkflowExecutionStatus.COMPLETED: JobStatus.COMPLETED,
    WorkflowExecutionStatus.FAILED: JobStatus.FAILED,
    WorkflowExecutionStatus.TIMED_OUT: JobStatus.FAILED,
    WorkflowExecutionStatus.CANCELED: JobStatus.CANCELLED,
    WorkflowExecutionStatus.TERMINATED: JobStatus.TERMINATED,
}

_STATE_QUERY = {
    JobStatus.RUNNING: "ExecutionStatus = 'Running'",
    JobStatus.COMPLETED: f"ExecutionStatus = 'Completed' AND {SEARCH_STATE} != 'stopped'",
    JobStatus.STOPPED: f"ExecutionStatus = 'Completed' AND {SEARCH_STATE} = 'stopped'",
    JobStatus.FAILED: "ExecutionStatus IN ('Failed', 'TimedOut')",
    JobStatus.CANCELLED: "ExecutionStatus = 'Canceled'",
    JobStatus.TERMINATED: "ExecutionStatus = 'Terminated'",
}


IDS_OF_A_QUERY = 100
"""Jobs that one query asks for by their ids."""


class JobRow(Frozen):
    """One job of a listing; `run_id` is its last run's, `started_at` its first's."""

    job_id: str
    run_id: str
    agent: str | None
    tenant: str | None
    status: JobStatus
    started_at: datetime
    closed_at: datetime | None

    def begun(self, at: datetime | None) -> JobRow:
        """Return the row with the start of the job's first run, if that is known."""
        return self if at is None else self.model_copy(update={"started_at": at})


def earlier_runs_query(job_ids: Sequence[str]) -> str:
    """Return the visibility query of the runs that went on as another run, of these jobs."""
    listed = ", ".join(f"'{job_id}'" for job_id in job_ids)
    return f"WorkflowId IN ({listed}) AND ExecutionStatus = 'ContinuedAsNew'"


def listing_query(status: JobStatus | None, agent: str | None, limit: int) -> str:
    """Return the visibility query of a listing; raises `BadInputError` for a bad filter."""
    if not 1 <= limit <= MAX_LISTED:
        raise BadInputError(
            f"a listing's limit is 1 to {MAX_LISTED:,}, got {limit:,}", hint="--limit 20"
        )
    terms = [f"WorkflowType IN {JOB_WORKFLOWS!r}", "ExecutionStatus != 'ContinuedAsNew'"]
    if status:
        terms.append(_STATE_QUERY[status])
    if agent is not None:
        if not _AGENT.fullmatch(agent):
            raise BadInputError(
                f"{agent[:80]!r} is not an agent's name", hint="muster jobs shows the agents' names"
            )
        terms.append(f"{SEARCH_AGENT} = '{agent}'")
    return " AND ".join(terms)


def row_of(found: WorkflowExecution) -> JobRow:
    """Return a job as Temporal's visibility knows it."""
    attributes = found.typed_search_attributes
    status = _STATUS[found.status or WorkflowExecutionStatus.RUNNING]
    state = attributes.get(STATE_KEY)
    if status is JobStatus.COMPLETED and state == JobStatus.STOPPED.value:
        status = JobStatus.STOPPED
    return JobRow(
        job_id=found.id,
        run_id=found.run_id,
        agent=attributes.get(AGENT_KEY),
        tenant=attributes.get(TENANT_KEY),
        status=status,
        started_at=found.start_time,
        closed_at=found.close_time,
    )
