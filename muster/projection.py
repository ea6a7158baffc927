"""Projections as a pure fold: a job's closed runs, and what the ledger adds, in; rows out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from temporalio.api.history.v1 import HistoryEvent

from contracts.llm_step import Usage
from muster.report import JobReport, build_report
from muster.turn_row import TimeParts, ToolRow, TurnRow
from store.database import storable
from store.projection import ProjectedCall, ProjectedJob, ProjectedTurn
from store.schema import TOKENS
from store.step_usage import StepUsage

PREVIEW_CHARS = 500
"""Of an answer or a failure in a job's row; the whole is in its history."""

MAX_NAME_CHARS = 400
"""Of the names of a call and its tool."""


def fold(
    job_id: str,
    histories: Iterable[Sequence[HistoryEvent]],
    ledger: Mapping[str, StepUsage],
) -> tuple[ProjectedJob, list[ProjectedTurn], list[ProjectedCall]]:
    """Return a job's rows from the histories of its closed runs, oldest first.

    `ledger` has the job's steps by their ids; it counts for those without a result in history.
    The same arguments give the same rows: no clock is read.
    """
    count = 0

    def counted() -> Iterable[Sequence[HistoryEvent]]:
        nonlocal count
        for events in histories:
            count += 1
            yield events

    usage = {step_id: step.usage for step_id, step in ledger.items()}
    report = build_report(job_id, counted(), ledger=usage)
    job, turns = _job(report, count, ledger), [_turn(job_id, row) for row in report.rows]
    asked = [(row.turn, tool) for row in report.rows for tool in row.tools]
    return job, turns, [_call(job_id, at, *each) for at, each in enumerate(asked, 1)]


def _job(report: JobReport, runs: int, ledger: Mapping[str, StepUsage]) -> ProjectedJob:
    lost = [row.step for row in report.rows if row.step and row.step.time is None]
    open_attempts = sum(ledger[step.step_id].running for step in lost if step.step_id in ledger)
    return ProjectedJob(
        job_id=report.job_id,
        agent=report.agent,
        tenant=report.tenant,
        model=report.model,
        status=report.status.value,
        stop_reason=report.stop_reason.value if report.stop_reason else None,
        started_at=report.started_at,
        closed_at=report.closed_at,
        runs=runs,
        turns=report.turns,
        llm_steps=report.llm_steps,
        tool_calls=report.tool_calls,
        **_tokens(report.usage),
        lower_bound=report.usage.lower_bound,
        open_attempts=open_attempts,
        answer=_preview(report.answer),
        failure=_preview(report.failure),
        wall_s=report.wall_s,
        people_s=report.people_s,
        other_s=report.other_s,
    )


def _turn(job_id: str, row: TurnRow) -> ProjectedTurn:
    step = row.step
    time = (step.time if step else None) or TimeParts()
    return ProjectedTurn(
        job_id=job_id,
        turn=row.turn,
        step_id=step.step_id if step else None,
        state=step.state if step else None,
        finish_reason=step.finish_reason if step else None,
        replica=step.replica if step else None,
        attempts=step.attempts if step else 0,
        cohort_size=step.cohort_size if step else 0,
        tool_calls=len(row.tools),
        **_tokens(row.usage),
        lower_bound=row.usage.lower_bound,
        total_s=step.total_s if step else 0.0,
        **time.model_copy(update={"tool_s": row.tool_s}).model_dump(),
        unfinished_s=step.unfinished_s if step else 0.0,
        backlog_s=step.backlog_s if step else 0.0,
        sub_agent_s=row.sub_agent_s,
        attainable_tokens=step.attainable_tokens if step else 0,
    )


def _call(job_id: str, number: int, turn: int, row: ToolRow) -> ProjectedCall:
    return ProjectedCall(
        job_id=job_id,
        number=number,
        turn=turn,
        call_id=storable(row.call_id, MAX_NAME_CHARS),
        tool=storable(row.tool, MAX_NAME_CHARS),
        state=row.state,
        outcome=row.outcome.value if row.outcome else None,
        sub_job=row.sub_job,
        is_failed=row.is_failed,
        attempts=row.attempts,
        **_tokens(row.spent.usage if row.spent else Usage()),
        total_s=row.total_s,
        duration_s=row.duration_s,
    )


def _tokens(usage: Usage) -> dict[str, int]:
    return {name: getattr(usage, name) for name in TOKENS}


def _preview(text: str | None) -> str | None:
    """Return the beginning of a text, as a PostgreSQL column takes it."""
    if text is None:
        return None
    cut = text if len(text) <= PREVIEW_CHARS else text[: PREVIEW_CHARS - 1] + "…"
    return storable(cut, PREVIEW_CHARS)
