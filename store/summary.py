"""Sums over the projections: where the time of many closed jobs went, by agent and by tool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from store.schema import LATER_TIMES, TIMES, TOKENS, WALL_TIMES, calls, jobs, turns


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over jobs and their own LLM steps: what sub-agents did is summed as their own jobs.

    Times in seconds, named as in the tables.
    """

    jobs: int = 0
    turns: int = 0
    llm_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    wasted_tokens: int = 0
    attainable_tokens: int = 0
    lower_bound: bool = False
    wall_s: float = 0.0
    people_s: float = 0.0
    other_s: float = 0.0
    orchestration_s: float = 0.0
    host_pre_s: float = 0.0
    ready_wait_s: float = 0.0
    backlog_s: float = 0.0
    engine_queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    host_post_s: float = 0.0
    tool_s: float = 0.0
    sub_agent_s: float = 0.0
    unfinished_s: float = 0.0

    def __add__(self, other: Totals) -> Totals:
        mine, theirs = _values(self), _values(other)
        return Totals(
            **{
                name: value or theirs[name] if isinstance(value, bool) else value + theirs[name]
                for name, value in mine.items()
            }
        )


@dataclass(frozen=True, slots=True)
class CallTotals:
    """Sums over the calls of one tool, or of one sub-agent.

    `waited_s` is from asked for to answered, `inside_s` inside the tool as far as it told.
    """

    tool: str
    is_sub_agent: bool
    calls: int
    failed: int
    waited_s: float
    inside_s: float
    longest_s: float

    def __add__(self, other: CallTotals) -> CallTotals:
        assert (self.tool, self.is_sub_agent) == (other.tool, other.is_sub_agent)
        return CallTotals(
            tool=self.tool,
            is_sub_agent=self.is_sub_agent,
            calls=self.calls + other.calls,
            failed=self.failed + other.failed,
            waited_s=self.waited_s + other.waited_s,
            inside_s=self.inside_s + other.inside_s,
            longest_s=max(self.longest_s, other.longest_s),
        )


@dataclass(frozen=True, slots=True)
class Which:
    """Which closed jobs: those that ended from `since` to before `until`, of an agent, a tenant."""

    since: datetime
    until: datetime
    agent: str | None = None
    tenant: str | None = None
    job_id: str | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """The sums: by agent (None: not known), the calls of each, and how many jobs ended how."""

    agents: Mapping[str | None, Totals]
    calls: Mapping[str | None, list[CallTotals]]
    states: Mapping[str, int]


_OF_STEPS = tuple(name for name in (*TIMES, *LATER_TIMES) if name != "total_s")


def _sum(column: sa.Column[Any]) -> sa.ColumnElement[Any]:
    """Return a sum as the type of its column: PostgreSQL's of `bigint` is `numeric`."""
    return sa.cast(sa.func.coalesce(sa.func.sum(column), 0), column.type).label(column.name)


_JOBS = sa.select(
    jobs.c.agent,
    jobs.c.status,
    sa.func.count().label("jobs"),
    *(_sum(jobs.c[name]) for name in WALL_TIMES),
).group_by(jobs.c.agent, jobs.c.status)
_TURNS = (
    sa.select(
        jobs.c.agent,
        sa.func.count().label("turns"),
        sa.func.count(turns.c.step_id).label("llm_steps"),
        *(_sum(turns.c[name]) for name in (*TOKENS, "attainable_tokens", *_OF_STEPS)),
        sa.func.bool_or(turns.c.lower_bound).label("lower_bound"),
    )
    .join_from(turns, jobs)
    .group_by(jobs.c.agent)
)
_IS_SUB_AGENT = calls.c.sub_job.is_not(None)
_CALLS = (
    sa.select(
        jobs.c.agent,
        calls.c.tool,
        _IS_SUB_AGENT.label("is_sub_agent"),
        sa.func.count().label("calls"),
        sa.func.count().filter(calls.c.is_failed).label("failed"),
        _sum(calls.c.total_s).label("waited_s"),
        _sum(calls.c.duration_s).label("inside_s"),
        sa.func.max(calls.c.total_s).label("longest_s"),
        *(_sum(calls.c[name]) for name in TOKENS),
    )
    .join_from(calls, jobs)
    .group_by(jobs.c.agent, calls.c.tool, _IS_SUB_AGENT)
)


async def read_summary(connection: AsyncConnection, which: Which) -> Summary:
    """Return the sums over the jobs that are asked for, as of one moment."""
    await connection.execute(sa.text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"))
    condition = _condition(which)
    agents: dict[str | None, Totals] = {}
    states: dict[str, int] = {}
    for row in await connection.execute(_JOBS.where(condition)):
        of_jobs = {name: getattr(row, name) for name in ("jobs", *WALL_TIMES)}
        agents[row.agent] = agents.get(row.agent, Totals()) + Totals(**of_jobs)
        states[row.status] = states.get(row.status, 0) + row.jobs
    for row in await connection.execute(_TURNS.where(condition)):
        agents[row.agent] += Totals(**{k: v for k, v in row._mapping.items() if k != "agent"})
    made: dict[str | None, list[CallTotals]] = {}
    for row in await connection.execute(_CALLS.where(condition)):
        of_calls = {field.name: getattr(row, field.name) for field in fields(CallTotals)}
        made.setdefault(row.agent, []).append(CallTotals(**of_calls))
        agents[row.agent] += Totals(**{name: -getattr(row, name) for name in TOKENS})
    return Summary(agents, made, states)


def _condition(which: Which) -> sa.ColumnElement[bool]:
    condition = (jobs.c.closed_at >= which.since) & (jobs.c.closed_at < which.until)
    for column, wanted in (
        (jobs.c.agent, which.agent),
        (jobs.c.tenant, which.tenant),
        (jobs.c.job_id, which.job_id),
    ):
        if wanted is not None:
            condition &= column == wanted
    return condition


def _values(totals: Totals) -> dict[str, Any]:
    return {field.name: getattr(totals, field.name) for field in fields(totals)}
