"""The two reports of `muster report`: of one job, and of the jobs that ended in a period."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import ConfigDict, NonNegativeFloat, ValidationError

from contracts.job import JobStatus
from contracts.message import Frozen
from muster.account import Account, Split, account_of, calls_of, totals_of, turn_split
from muster.advice import Advice, advise
from muster.report import JobReport
from store.summary import Summary, Totals, Which


class TurnTime(Frozen):
    """Where one turn's time went, and what it called."""

    turn: int
    split: Split
    tools: tuple[str, ...]


class JobTimes(Frozen):
    """One job."""

    job_id: str
    agent: str | None
    model: str | None
    tenant: str | None
    status: JobStatus
    started_at: datetime
    closed_at: datetime | None
    advice: Advice
    account: Account
    turns: tuple[TurnTime, ...]


class AgentTimes(Frozen):
    """The jobs of one agent; `agent` is None where history does not tell it."""

    agent: str | None
    advice: Advice
    account: Account


class EngineTime(Frozen):
    """Where the wall time of one inference service's engine went since its start, in seconds.

    The parts are those of the engine's ledger; `opportunity` is the share, 0 to 1, that better
    serving could have used.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    wall_s: NonNegativeFloat
    useful_prefill_s: float
    useful_decode_s: float
    pending_s: float
    recompute_s: float
    waste_s: float
    gap_s: float
    idle_ready_s: float
    idle_s: float
    opportunity: float


class PeriodTimes(Frozen):
    """The jobs that ended from `since` to before `until`, of one agent or tenant if one is named.

    `engine` is the running inference service's, since its own start: None if none answers.
    """

    since: datetime
    until: datetime
    agent: str | None
    tenant: str | None
    states: dict[str, int]
    advice: Advice
    account: Account
    agents: tuple[AgentTimes, ...]
    engine: EngineTime | None


def job_times(report: JobReport, price: float) -> JobTimes:
    """Return the report of one job; `price` is of one GPU hour, 0 if nobody told it."""
    account = account_of(totals_of(report), calls_of(report.rows), price)
    turns = [
        TurnTime(turn=row.turn, split=turn_split(row), tools=tuple(t.tool for t in row.tools))
        for row in report.rows
    ]
    return JobTimes(
        job_id=report.job_id,
        agent=report.agent,
        model=report.model,
        tenant=report.tenant,
        status=report.status,
        started_at=report.started_at,
        closed_at=report.closed_at,
        advice=advise(account),
        account=account,
        turns=tuple(turns),
    )


def period_times(
    summary: Summary, which: Which, price: float, engine: EngineTime | None
) -> PeriodTimes:
    """Return the report of a period from the sums over its jobs; agents with most time first."""
    agents: list[AgentTimes] = []
    for agent, totals in summary.agents.items():
        account = account_of(totals, summary.calls.get(agent, ()), price)
        agents.append(AgentTimes(agent=agent, advice=advise(account), account=account))
    calls = [each for made in summary.calls.values() for each in made]
    account = account_of(sum(summary.agents.values(), Totals()), calls, price)
    return PeriodTimes(
        since=which.since,
        until=which.until,
        agent=which.agent,
        tenant=which.tenant,
        states=dict(sorted(summary.states.items())),
        advice=advise(account),
        account=account,
        agents=tuple(sorted(agents, key=lambda each: (-each.account.wall_s, each.agent or ""))),
        engine=engine,
    )


def engine_time(cohorts: dict[str, Any]) -> EngineTime | None:
    """Return the engine's ledger from `GET /cohorts`; None if there is none to be read."""
    try:
        found = EngineTime.model_validate(cohorts.get("gpu"))
    except ValidationError:
        return None
    return found if found.wall_s else None
