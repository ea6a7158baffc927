"""A job's report: what each turn did, what came out, and where the time went.

Computed from the job's Temporal history; the ledger adds the tokens of LLM steps that history has
no result of. `turn_row.py` says how a turn's time is split. What the wall time holds beside the
turns' parts is `people_s`, the wait for people (`people_wait.py`), and `other_s`, the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from pydantic import Field, JsonValue
from temporalio.api.history.v1 import HistoryEvent
from temporalio.api.workflow.v1 import PendingActivityInfo

from contracts.agent import AgentSpec
from contracts.job import AgentJobInput, AgentJobResult, JobStatus, OpenJobResult, StopReason
from contracts.llm_step import Usage
from contracts.message import Frozen, is_false
from contracts.name import OPEN_JOB
from contracts.plan_job import PlanJobStart
from muster.decided import Decided, DecisionRow
from muster.history import Activity, activities, elapsed_s, first_json, parsed, time_ns
from muster.job_ending import job_ending
from muster.people_wait import PeopleWait
from muster.turn_row import TimeParts, TurnRow, turn_rows
from muster.unread import Unread

_NO_USAGE: Mapping[str, Usage] = MappingProxyType({})


class JobReport(Frozen):
    """All that a job's history says, for people and programs."""

    job_id: str
    agent: str | None
    """Or the plan's name."""
    is_plan: bool = Field(False, exclude_if=is_false)
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
    people_s: float
    other_s: float
    mean_cohort_size: float | None
    rows: tuple[TurnRow, ...]
    unread: tuple[str, ...] = ()
    """Ids of the messages that it has taken and no LLM step has read."""
    decisions: tuple[DecisionRow, ...] = ()
    """What people have decided on it, in order."""

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
    runs: Iterable[Sequence[HistoryEvent]],
    *,
    now: datetime | None = None,
    pending: Sequence[PendingActivityInfo] = (),
    ledger: Mapping[str, Usage] = _NO_USAGE,
) -> JobReport:
    """Return the report of a job from the histories of its runs, oldest first.

    More than one run: the job continued as new. The last may be cut off anywhere after its first
    event. `now` bounds what is still open (None: the last event does); `pending` tells the
    attempts of open activities, `ledger` the tokens of steps by their ids, which count where
    history has no result.
    """
    first, run, found = None, list[HistoryEvent](), list[Activity]()
    unread, decided, people = Unread(), Decided(), PeopleWait()
    for events in runs:
        assert events, "a history has at least its first event"
        unread.follow(events)
        decided.follow(events)
        people.follow(events)
        found += activities(run)
        first, run = first or events[0], list(events)
    assert first, "a job has at least one run"
    found += activities(run, pending)
    ending = job_ending(run)
    end_ns = ending.at_ns or _latest_ns(run[-1], now)
    rows = turn_rows(found, end_ns, over=ending.at_ns is not None, ledger=ledger)
    steps = [row.step for row in rows if row.step]
    time = sum(
        (step.time for step in steps if step.time),
        TimeParts(tool_s=sum(row.tool_s for row in rows)),
    )
    unfinished_s = sum(step.unfinished_s for step in steps)
    people_s = people.alone_s(found, end_ns)
    wall_s = elapsed_s(time_ns(first), end_ns)
    cohorts = [step.cohort_size for step in steps if step.cohort_size]
    given = first_json(first.workflow_execution_started_event_attributes.input)
    started = parsed(AgentJobInput, given) or parsed(PlanJobStart, given)
    result = ending.result
    return JobReport(
        job_id=job_id,
        agent=started.name if started else None,
        is_plan=isinstance(started, PlanJobStart),
        model=started.model if started else None,
        tenant=started.tenant if started else None,
        status=ending.status,
        stop_reason=result.stop_reason if result else None,
        answer=result.answer if result else None,
        failure=ending.failure,
        hint=ending.hint,
        started_at=_moment(time_ns(first)),
        closed_at=_moment(ending.at_ns) if ending.at_ns is not None else None,
        **_counts(rows, result),
        usage=sum((row.usage for row in rows), Usage()),
        wall_s=wall_s,
        time=time,
        unfinished_s=unfinished_s,
        people_s=people_s,
        other_s=max(0.0, wall_s - time.total_s - unfinished_s - people_s),
        mean_cohort_size=sum(cohorts) / len(cohorts) if cohorts else None,
        rows=tuple(rows),
        unread=result.unread if result else tuple(message.id for message in unread.messages),
        decisions=decided.rows(
            _agent(started, found), {call.id: call for step in steps for call in step.tool_calls}
        ),
    )


def _agent(
    started: AgentJobInput | PlanJobStart | None, found: Iterable[Activity]
) -> AgentSpec | None:
    """Return a job's agent with the tools that its servers had when the job opened."""
    if not isinstance(started, AgentJobInput):
        return None
    opened = (parsed(OpenJobResult, each.result) for each in found if each.name == OPEN_JOB)
    return started.agent.pinned(next((each.tools for each in opened if each), ()))


def _latest_ns(last: HistoryEvent, now: datetime | None) -> int:
    """Return the time of the last event, or now if that is later."""
    return max(int(now.timestamp() * 1e9), time_ns(last)) if now else time_ns(last)


def _counts(rows: Sequence[TurnRow], result: AgentJobResult | None) -> dict[str, Any]:
    """Return how many turns, LLM steps and tool calls there were: as its result says, if any."""
    if result is not None:
        return result.model_dump(include={"turns", "llm_steps", "tool_calls"})
    spent = [tool.spent for row in rows for tool in row.tools if tool.spent]
    steps = sum(row.step is not None and row.step.time is not None for row in rows)
    return {
        "turns": len(rows),
        "llm_steps": steps + sum(each.llm_steps for each in spent),
        "tool_calls": sum(len(row.tools) for row in rows) + sum(each.tool_calls for each in spent),
    }


def _moment(at_ns: int) -> datetime:
    return datetime.fromtimestamp(at_ns / 1e9, UTC)
