"""What the ledger says of a job's LLM steps: the tokens of all attempts, and which still run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from contracts.llm_step import Usage
from store.attempt import AttemptOutcome
from store.schema import TOKENS, step_ledger


@dataclass(frozen=True, slots=True)
class StepUsage:
    """One step: its tokens over all attempts, and how many of these have not ended."""

    usage: Usage
    running: int


_table = step_ledger.c
_KEPT = (AttemptOutcome.RUNNING.value, AttemptOutcome.FINISHED.value)


def _is_of_job(job_id: sa.ColumnElement[str]) -> sa.ColumnElement[bool]:
    """Say that a row is of a job, by the range of its step ids: the primary key finds it."""
    return (_table.step_id >= job_id + "/") & (_table.step_id < job_id + "0")


_of_job = _is_of_job(sa.bindparam("at_job", type_=sa.Text(collation="C")))
_sums = {name: sa.func.sum(_table[name]) for name in TOKENS}
# Nothing that an attempt without a kept result has generated was kept.
_sums["wasted_tokens"] = sa.func.sum(
    sa.case((_table.outcome.in_(_KEPT), _table.wasted_tokens), else_=_table.completion_tokens)
)
_running = sa.func.count().filter(_table.outcome == AttemptOutcome.RUNNING.value)
_READ = (
    sa.select(
        _table.step_id,
        *(sa.cast(total, sa.BigInteger).label(name) for name, total in _sums.items()),
        sa.func.bool_or(_table.lower_bound).label("lower_bound"),
        _running.label("running"),
    )
    .where(_of_job)
    .group_by(_table.step_id)
)


async def step_usage(connection: AsyncConnection, job_id: str) -> dict[str, StepUsage]:
    """Return the steps of a job by their ids."""
    rows = await connection.execute(_READ, {"at_job": job_id})
    return {row.step_id: StepUsage(_usage(row), row.running) for row in rows}


def running_attempts(job_id: sa.ColumnElement[str]) -> sa.ScalarSelect[int]:
    """Return the number of a job's attempts that have not ended, as part of a statement."""
    return sa.select(_running).where(_is_of_job(job_id)).scalar_subquery()


def _usage(row: sa.Row[Any]) -> Usage:
    counts = {name: getattr(row, name) for name in TOKENS}
    return Usage(**counts, lower_bound=row.lower_bound or row.running > 0)
