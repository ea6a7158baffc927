"""The projections: one row per job, per turn and per call, for listings and sums over many jobs.

They hold nothing of their own: each row is a fold of archived histories (and of the ledger, for
what these cannot hold), and may be thrown away and made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from store.database import Database
from store.schema import calls, histories, jobs, turns
from store.step_usage import running_attempts


@dataclass(frozen=True, slots=True)
class ProjectedJob:
    """One job. `answer` and `failure` are previews.

    `open_attempts` counts the attempts at LLM steps that had not ended though the job had: their
    tokens will be known later.
    """

    job_id: str
    agent: str | None
    tenant: str | None
    model: str | None
    status: str
    stop_reason: str | None
    started_at: datetime
    closed_at: datetime | None
    runs: int
    turns: int
    llm_steps: int
    tool_calls: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    wasted_tokens: int
    lower_bound: bool
    open_attempts: int
    answer: str | None
    failure: str | None
    wall_s: float
    people_s: float
    other_s: float


@dataclass(frozen=True, slots=True)
class ProjectedTurn:
    """One turn: its LLM step (None: a tool call came before any) and the tool calls after it.

    Tokens are those of the step and of the sub-agents that were called. `total_s` is the step's; it
    is the sum of its parts and of `unfinished_s`. `tool_s` stands beside it: the time in which a
    tool call was in flight. `backlog_s` is a part of `ready_wait_s`, `sub_agent_s` of `tool_s`.
    """

    job_id: str
    turn: int
    step_id: str | None
    state: str | None
    finish_reason: str | None
    replica: str | None
    attempts: int
    cohort_size: int
    tool_calls: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    wasted_tokens: int
    lower_bound: bool
    total_s: float
    orchestration_s: float
    host_pre_s: float
    ready_wait_s: float
    engine_queue_s: float
    prefill_s: float
    decode_s: float
    host_post_s: float
    tool_s: float
    unfinished_s: float
    backlog_s: float
    sub_agent_s: float
    attainable_tokens: int


@dataclass(frozen=True, slots=True)
class ProjectedCall:
    """One call of a tool, or of a sub-agent (`sub_job`), whose tokens are then what it had used.

    `total_s` is from asked for to answered, `duration_s` inside the tool, as far as that is known.
    """

    job_id: str
    number: int
    turn: int
    call_id: str
    tool: str
    state: str
    outcome: str | None
    sub_job: str | None
    is_failed: bool
    attempts: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    wasted_tokens: int
    total_s: float
    duration_s: float | None


MAX_STALE = 1_000
"""Jobs with late news from the ledger that one look returns."""

_PUT_JOB = insert(jobs)
_PUT_JOB = _PUT_JOB.on_conflict_do_update(
    index_elements=[jobs.c.job_id],
    set_={column.name: column for column in _PUT_JOB.excluded if column.name != "job_id"},
)
_DROP_TURNS = sa.delete(turns).where(turns.c.job_id == sa.bindparam("at_job"))
_PUT_TURN = insert(turns)
_DROP_CALLS = sa.delete(calls).where(calls.c.job_id == sa.bindparam("at_job"))
_PUT_CALL = insert(calls)
_READ_JOB = sa.select(jobs).where(jobs.c.job_id == sa.bindparam("at_job"))
_READ_TURNS = (
    sa.select(turns).where(turns.c.job_id == sa.bindparam("at_job")).order_by(turns.c.turn)
)
_READ_CALLS = (
    sa.select(calls).where(calls.c.job_id == sa.bindparam("at_job")).order_by(calls.c.number)
)
_DROP_UNARCHIVED = (
    sa.delete(jobs)
    .where(~sa.exists().where(histories.c.job_id == jobs.c.job_id))
    .returning(jobs.c.job_id)
)
_STALE = (
    sa.select(jobs.c.job_id)
    .where((jobs.c.open_attempts > 0) & (running_attempts(jobs.c.job_id) < jobs.c.open_attempts))
    .limit(MAX_STALE)
)


async def put_projection(
    connection: AsyncConnection,
    job: ProjectedJob,
    rows: Sequence[ProjectedTurn],
    made: Sequence[ProjectedCall],
) -> None:
    """Replace a job's rows."""
    await connection.execute(_PUT_JOB, asdict(job))
    await connection.execute(_DROP_TURNS, {"at_job": job.job_id})
    if rows:
        await connection.execute(_PUT_TURN, [asdict(row) for row in rows])
    await connection.execute(_DROP_CALLS, {"at_job": job.job_id})
    if made:
        await connection.execute(_PUT_CALL, [asdict(call) for call in made])


class Projections:
    """Reads the projections, and forgets what nothing stands behind."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def job(self, job_id: str) -> ProjectedJob | None:
        """Return a job's row; None if none of its runs has been archived."""
        rows = await self._database.fetch(_READ_JOB, {"at_job": job_id})
        return ProjectedJob(**rows[0]._mapping) if rows else None

    async def turns(self, job_id: str) -> list[ProjectedTurn]:
        """Return a job's turns, in order."""
        rows = await self._database.fetch(_READ_TURNS, {"at_job": job_id})
        return [ProjectedTurn(**row._mapping) for row in rows]

    async def calls(self, job_id: str) -> list[ProjectedCall]:
        """Return a job's calls, in order."""
        rows = await self._database.fetch(_READ_CALLS, {"at_job": job_id})
        return [ProjectedCall(**row._mapping) for row in rows]

    async def stale(self) -> list[str]:
        """Return jobs of which attempts have ended since their rows were made."""
        return [row.job_id for row in await self._database.fetch(_STALE)]

    async def drop_unarchived(self) -> int:
        """Drop the rows of jobs that have no archived run; return how many jobs they were."""
        return len(await self._database.fetch(_DROP_UNARCHIVED))
