"""A job's report: what each turn did, what came out, and where the time went.

Computed from the job's Temporal history; the ledger adds the tokens of LLM steps that history has
no result of. Each LLM step's time is split into parts that sum to its total:

- The total is from server event times, scheduled to completed. If the server's clock jumped and
  this is less than the service measured with its own monotonic clock, the service's sum stands.
- The parts inside the service are what it measured (`StepTiming`).
- Backlog, the wait on the task queue before the last attempt started, is a part of `ready_wait`;
  never below 0, and no more than the total leaves beside the measured parts.
- `orchestration` is the remainder.

Tool time is the time during which at least one tool call of the turn was in flight. LLM steps
without a result (open, failed, lost) have no parts, and of a cancelled one only the parts that it
told are known: the rest of their time is `unfinished_s`. What the wall time holds beside all these,
between the activities, is `other_s`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType

from pydantic import JsonValue
from temporalio.api.history.v1 import HistoryEvent
from temporalio.api.workflow.v1 import PendingActivityInfo

from contracts.job import AgentJobInput, JobStatus, StopReason
from contracts.llm_step import LLMStepInput, LLMStepResult, Outcome, StepTiming, Usage
from contracts.message import Frozen, ToolCall
from contracts.name import CALL_TOOL, LLM_STEP
from contracts.tool import CallToolInput, CallToolResult, ToolOutcome
from muster.history import (
    Activity,
    ActivityState,
    activities,
    elapsed_s,
    first_json,
    parsed,
    time_ns,
)
from muster.job_ending import job_ending

_NO_USAGE: Mapping[str, Usage] = MappingProxyType({})


class TimeParts(Frozen):
    """Where time went, in seconds."""

    orchestration_s: float = 0.0
    host_pre_s: float = 0.0
    ready_wait_s: float = 0.0
    engine_queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    host_post_s: float = 0.0
    tool_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Sum of all parts."""
        return (
            self.orchestration_s
            + self.host_pre_s
            + self.ready_wait_s
            + self.engine_queue_s
            + self.prefill_s
            + self.decode_s
            + self.host_post_s
            + self.tool_s
        )

    def __add__(self, other: TimeParts) -> TimeParts:
        theirs = other.model_dump()
        return TimeParts(**{key: value + theirs[key] for key, value in self.model_dump().items()})


class StepRow(Frozen):
    """One LLM step; `time` (None without a result) and `unfinished_s` sum to `total_s`."""

    step_id: str
    state: str
    attempts: int
    failure: str | None
    total_s: float
    time: TimeParts | None = None
    unfinished_s: float = 0.0
    usage: Usage = Usage()
    finish_reason: str | None = None
    cohort_size: int = 0
    replica: str | None = None
    epoch: int | None = None
    content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


class ToolRow(Frozen):
    """One tool call. `total_s` is from asked for to answered, `duration_s` inside the tool."""

    call_id: str
    tool: str
    arguments: dict[str, JsonValue]
    state: str
    attempts: int
    failure: str | None
    total_s: float
    duration_s: float | None = None
    outcome: ToolOutcome | None = None
    content: str | None = None


class TurnRow(Frozen):
    """One turn: an LLM step and the tool calls that followed it."""

    turn: int
    step: StepRow | None
    tools: tuple[ToolRow, ...] = ()
    tool_s: float = 0.0


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
    for events in runs:
        assert events, "a history has at least its first event"
        found += activities(run)
        first, run = first or events[0], list(events)
    assert first, "a job has at least one run"
    found += activities(run, pending)
    ending = job_ending(run)
    last_ns = time_ns(run[-1])
    end_ns = ending.at_ns or (max(int(now.timestamp() * 1e9), last_ns) if now else last_ns)
    rows = _rows(found, end_ns, over=ending.at_ns is not None, ledger=ledger)
    steps = [row.step for row in rows if row.step]
    time = sum((step.time for step in steps if step.time), TimeParts(tool_s=_tool_s(rows)))
    unfinished_s = sum(step.unfinished_s for step in steps)
    wall_s = elapsed_s(time_ns(first), end_ns)
    cohorts = [step.cohort_size for step in steps if step.cohort_size]
    started = parsed(
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
        llm_steps=result.llm_steps if result else sum(step.time is not None for step in steps),
        tool_calls=result.tool_calls if result else sum(len(row.tools) for row in rows),
        usage=sum((step.usage for step in steps), _lower_bound(steps)),
        wall_s=wall_s,
        time=time,
        unfinished_s=unfinished_s,
        other_s=max(0.0, wall_s - time.total_s - unfinished_s),
        mean_cohort_size=sum(cohorts) / len(cohorts) if cohorts else None,
        rows=tuple(rows),
    )


def split_time(activity: Activity, timing: StepTiming) -> TimeParts:
    """Return the parts of a completed LLM step; they sum to its total."""
    assert activity.closed_ns is not None, "only a completed step has parts"
    total_s = max(elapsed_s(activity.scheduled_ns, activity.closed_ns), timing.total_s)
    rest_s = total_s - timing.total_s
    started_ns = activity.scheduled_ns if activity.started_ns is None else activity.started_ns
    backlog_s = min(elapsed_s(activity.scheduled_ns, started_ns), rest_s)
    return TimeParts(
        orchestration_s=rest_s - backlog_s,
        host_pre_s=timing.host_pre_s,
        ready_wait_s=timing.ready_wait_s + backlog_s,
        engine_queue_s=timing.engine_queue_s,
        prefill_s=timing.prefill_s,
        decode_s=timing.decode_s,
        host_post_s=timing.host_post_s,
    )


def _rows(
    found: Iterable[Activity], end_ns: int, *, over: bool, ledger: Mapping[str, Usage]
) -> list[TurnRow]:
    """Group activities into turns: each LLM step begins one, its tool calls follow it."""
    turns: list[tuple[StepRow | None, list[Activity]]] = []
    for activity in found:
        if activity.name == LLM_STEP:
            turns.append((_step_row(activity, end_ns, over=over, ledger=ledger), []))
        elif activity.name == CALL_TOOL:
            if not turns:
                turns.append((None, []))
            turns[-1][1].append(activity)
    rows: list[TurnRow] = []
    for index, (step, calls) in enumerate(turns):
        tools = tuple(_tool_row(call, end_ns, over=over) for call in calls)
        tool_s = max([_busy_s(calls, end_ns), *(tool.total_s for tool in tools)])
        rows.append(TurnRow(turn=index + 1, step=step, tools=tools, tool_s=tool_s))
    return rows


def _lower_bound(steps: Iterable[StepRow]) -> Usage:
    """Return no usage, marked if history misses what steps without a result have used."""
    return Usage(lower_bound=any(step.time is None for step in steps))


def _tool_s(rows: Iterable[TurnRow]) -> float:
    return sum(row.tool_s for row in rows)


def _busy_s(calls: Sequence[Activity], end_ns: int) -> float:
    """Return the seconds during which at least one of the calls was in flight."""
    spans = sorted((call.scheduled_ns, call.closed_ns or end_ns) for call in calls)
    busy_ns, reached_ns = 0, 0
    for start_ns, stop_ns in spans:
        busy_ns += max(0, stop_ns - max(start_ns, reached_ns))
        reached_ns = max(reached_ns, stop_ns)
    return busy_ns / 1e9


def _step_row(
    activity: Activity, end_ns: int, *, over: bool, ledger: Mapping[str, Usage]
) -> StepRow:
    asked = parsed(LLMStepInput, activity.argument)
    result = parsed(LLMStepResult, activity.result)
    total_s = elapsed_s(activity.scheduled_ns, activity.closed_ns or end_ns)
    row = StepRow(
        step_id=asked.step_id if asked else activity.activity_id,
        state=_state(activity, over=over),
        attempts=activity.attempts,
        failure=activity.failure,
        total_s=total_s,
        unfinished_s=total_s,
    )
    if result is None:
        return row.model_copy(update={"usage": ledger.get(row.step_id, row.usage)})
    time = split_time(activity, result.timing)
    total_s, unfinished_s = time.total_s, 0.0
    message = result.message
    cancelled = result.outcome is Outcome.CANCELLED
    if cancelled:
        unfinished_s = time.orchestration_s
        time = time.model_copy(update={"orchestration_s": 0.0})
    return row.model_copy(
        update={
            "state": ActivityState.CANCELLED.value if cancelled else row.state,
            "total_s": total_s,
            "time": time,
            "unfinished_s": unfinished_s,
            "usage": result.usage,
            "finish_reason": result.finish_reason.value,
            "cohort_size": result.cohort_size,
            "replica": result.replica,
            "epoch": result.epoch,
            "content": message.content if message else None,
            "tool_calls": message.tool_calls if message else (),
        }
    )


def _tool_row(activity: Activity, end_ns: int, *, over: bool) -> ToolRow:
    asked = parsed(CallToolInput, activity.argument)
    result = parsed(CallToolResult, activity.result)
    total_s = elapsed_s(activity.scheduled_ns, activity.closed_ns or end_ns)
    return ToolRow(
        call_id=asked.call.id if asked else activity.activity_id,
        tool=asked.call.tool if asked else CALL_TOOL,
        arguments=asked.call.arguments if asked else {},
        state=_state(activity, over=over),
        attempts=activity.attempts,
        failure=activity.failure,
        total_s=max(total_s, result.duration_s) if result else total_s,
        duration_s=result.duration_s if result else None,
        outcome=result.outcome if result else None,
        content=result.content if result else None,
    )


def _state(activity: Activity, *, over: bool) -> str:
    if over and activity.state is ActivityState.OPEN:
        return ActivityState.LOST.value
    return activity.state.value


def _moment(at_ns: int) -> datetime:
    return datetime.fromtimestamp(at_ns / 1e9, UTC)
