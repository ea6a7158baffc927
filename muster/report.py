"""A job's report: what each turn did, what came out, and where the time went.

Computed from the job's Temporal history alone; `turn_row.py` says how a turn's time is split. What
the wall time holds beside the turns' parts, between the activities, is `other_s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import chain

from pydantic import JsonValue
from temporalio.api.history.v1 import HistoryEvent
from temporalio.api.workflow.v1 import PendingActivityInfo

from contracts.job import AgentJobInput, AgentJobResult, JobStatus, StopReason
from contracts.llm_step import Usage
from contracts.message import Frozen
from muster.history import (
    activities,
    elapsed_s,
    failure_hint,
    failure_text,
    first_json,
    parse,
    time_ns,
)
from muster.turn_row import TimeParts, TurnRow, turn_rows


class JobReport(Frozen):
    """All that a job's history says, for people and programs."""

    job_id: str
    agent: str | None
    model: str | None
    tenant: str | None
    status: JobStatus
    stop_reason: StopReason | None
    answer: str | None
    failure: str | None
    hint: str | None
    started_at: datetime
    closed_at: datetime | None
    turns: int
    llm_steps: int
    tool_calls: int
    usage: Usage
    wall_s: float
    time: TimeParts
    unfinished_s: float
    other_s: float
    mean_cohort_size: float | None
    rows: tuple[TurnRow, ...]

    def summary(self) -> dict[str, JsonValue]:
        """Return the one object that `muster run --json` prints."""
        usage = self.usage.model_dump(include=set(_USAGE_KEYS))
        whole = self.model_dump(mode="json", include=set(_SUMMARY_KEYS))
        return {key: usage if key == "usage" else whole[key] for key in _SUMMARY_KEYS}


_USAGE_KEYS = ("prompt_tokens", "cached_tokens", "completion_tokens")
_SUMMARY_KEYS = (
    "job_id", "status", "answer", "turns", "llm_steps", "tool_calls", "usage", "wall_s", "time",
)  # fmt: skip


def build_report(
    job_id: str,
    runs: Sequence[Sequence[HistoryEvent]],
    *,
    now: datetime,
    pending: Sequence[PendingActivityInfo] = (),
) -> JobReport:
    """Return the report of a job from the histories of its runs, oldest first.

    More than one run: the job continued as new. The last may be cut off anywhere after its first
    event. `now` bounds what is still open; `pending` tells the attempts of open activities.
    """
    assert runs, "a job has at least one run"
    assert runs[0], "a history has at least its first event"
    first, last = runs[0][0], runs[-1][-1]
    ending = _ending(runs[-1])
    now_ns = max(int(now.timestamp() * 1e9), time_ns(last))
    end_ns = ending.at_ns or now_ns
    earlier = chain.from_iterable(activities(run) for run in runs[:-1])
    found = chain(earlier, activities(runs[-1], pending))
    rows = turn_rows(found, end_ns, over=ending.at_ns is not None)
    steps = [row.step for row in rows if row.step]
    sub_agents = [tool for row in rows for tool in row.tools if tool.sub_job]
    spent = [each.spent for each in sub_agents if each.spent]
    time = sum(
        (step.time for step in steps if step.time),
        TimeParts(tool_s=sum(row.tool_s for row in rows)),
    )
    unfinished_s = sum(step.unfinished_s for step in steps)
    wall_s = elapsed_s(time_ns(first), end_ns)
    cohorts = [step.cohort_size for step in steps if step.cohort_size]
    started = parse(
        AgentJobInput, first_json(first.workflow_execution_started_event_attributes.input)
    )
    result = ending.result
    return JobReport(
        job_id=job_id,
        agent=started.agent.name if started else None,
        model=started.model if started else None,
        tenant=started.tenant if started else None,
        status=ending.status,
        stop_reason=result.stop_reason if result else None,
        answer=result.answer if result else None,
        failure=ending.failure,
        hint=ending.hint,
        started_at=_moment(time_ns(first)),
        closed_at=_moment(ending.at_ns) if ending.at_ns is not None else None,
        turns=result.turns if result else len(rows),
        llm_steps=result.llm_steps
        if result
        else sum(step.time is not None for step in steps) + sum(each.llm_steps for each in spent),
        tool_calls=result.tool_calls
        if result
        else sum(len(row.tools) for row in rows) + sum(each.tool_calls for each in spent),
        usage=sum(
            (*(step.usage for step in steps), *(each.usage for each in spent)),
            Usage(
                lower_bound=any(step.time is None for step in steps) or len(spent) < len(sub_agents)
            ),
        ),
        wall_s=wall_s,
        time=time,
        unfinished_s=unfinished_s,
        other_s=max(0.0, wall_s - time.total_s - unfinished_s),
        mean_cohort_size=sum(cohorts) / len(cohorts) if cohorts else None,
        rows=tuple(rows),
    )


class _Ending(Frozen):
    """How a job's last run stands; `at_ns` is None while it runs."""

    status: JobStatus
    at_ns: int | None = None
    result: AgentJobResult | None = None
    failure: str | None = None
    hint: str | None = None


def _ending(events: Sequence[HistoryEvent]) -> _Ending:
    last = events[-1]
    at_ns = time_ns(last)
    match last.WhichOneof("attributes"):
        case "workflow_execution_completed_event_attributes":
            payloads = last.workflow_execution_completed_event_attributes.result
            result = parse(AgentJobResult, first_json(payloads))
            stopped = result is not None and result.stop_reason is not StopReason.ANSWERED
            status = JobStatus.STOPPED if stopped else JobStatus.COMPLETED
            return _Ending(status=status, at_ns=at_ns, result=result)
        case "workflow_execution_failed_event_attributes":
            failure = last.workflow_execution_failed_event_attributes.failure
            return _Ending(
                status=JobStatus.FAILED,
                at_ns=at_ns,
                failure=failure_text(failure),
                hint=failure_hint(failure),
            )
        case "workflow_execution_timed_out_event_attributes":
            late = "the job ran longer than its execution timeout"
            return _Ending(status=JobStatus.FAILED, at_ns=at_ns, failure=late)
        case "workflow_execution_canceled_event_attributes":
            return _Ending(status=JobStatus.CANCELLED, at_ns=at_ns)
        case "workflow_execution_terminated_event_attributes":
            reason = last.workflow_execution_terminated_event_attributes.reason
            return _Ending(status=JobStatus.TERMINATED, at_ns=at_ns, failure=reason or None)
        case _:
            return _Ending(status=JobStatus.RUNNING)


def _moment(at_ns: int) -> datetime:
    return datetime.fromtimestamp(at_ns / 1e9, UTC)
