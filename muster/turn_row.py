"""A job's turns, from the activities of its history: LLM steps, tool calls, sub-agents' jobs.

Each LLM step's time is split into parts that sum to its total:

- The total is from server event times, scheduled to completed. If the server's clock jumped and
  this is less than the service measured with its own monotonic clock, the service's sum stands.
- The parts inside the service are what it measured (`StepTiming`).
- Backlog, the wait on the task queue before the last attempt started, is a part of `ready_wait`;
  never below 0, and no more than the total leaves beside the measured parts.
- `orchestration` is the remainder.

Tool time is the time during which at least one call of the turn was in flight; `sub_agent_s` is the
part of it during which none but sub-agents were. LLM steps without a
result (open, failed, lost) have no parts, and of a cancelled one only the parts that it told are
known: the rest of their time is `unfinished_s`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pydantic import JsonValue

from contracts.job import AgentJobInput, AgentJobResult, Spent
from contracts.limit import INLINE_RESULT_BYTES
from contracts.llm_step import Divergence, LLMStepInput, LLMStepResult, Outcome, StepTiming, Usage
from contracts.message import BlobRef, Frozen, ToolCall
from contracts.name import AGENT_WORKFLOW, CALL_TOOL, LLM_STEP, TASK
from contracts.tool import CallToolInput, CallToolResult, ToolOutcome
from muster.attainable import Sessions
from muster.history import Activity, ActivityState, covered_s, elapsed_s, parsed

PREVIEW_CHARS = 500
"""Of a large result that a remote activity gave."""


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
    """One LLM step; `time` (None without a result) and `unfinished_s` sum to `total_s`.

    `backlog_s` is the part of `ready_wait_s` before the service took it from its task queue.
    `attainable_tokens` of its prompt were cached, or had been computed in its session before.
    """

    step_id: str
    state: str
    attempts: int
    failure: str | None
    total_s: float
    time: TimeParts | None = None
    backlog_s: float = 0.0
    unfinished_s: float = 0.0
    usage: Usage = Usage()
    attainable_tokens: int = 0
    finish_reason: str | None = None
    cohort_size: int = 0
    replica: str | None = None
    epoch: int | None = None
    content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    diverged: Divergence | None = None


class ToolRow(Frozen):
    """One tool call. `total_s` is from asked for to answered, `duration_s` inside the tool.

    With a `blob` the store has the whole result, and `content` is its preview.

    Or a call of a sub-agent: `sub_job` is its job, `spent` what that has used, as far as it told.
    """

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
    blob: BlobRef | None = None
    sub_job: str | None = None
    spent: Spent | None = None

    @property
    def is_failed(self) -> bool:
        """Whether it did not give the model what it asked for."""
        fine = (ActivityState.COMPLETED, ActivityState.OPEN, ActivityState.CANCELLED)
        return self.outcome is ToolOutcome.ERROR or self.state not in fine


class TurnRow(Frozen):
    """One turn: an LLM step and the tool calls that followed it."""

    turn: int
    step: StepRow | None
    tools: tuple[ToolRow, ...] = ()
    tool_s: float = 0.0
    sub_agent_s: float = 0.0

    @property
    def usage(self) -> Usage:
        """Tokens of the step and of the sub-agents that were called, as far as they are known."""
        sub_agents = [tool for tool in self.tools if tool.sub_job]
        is_open = self.step is not None and self.step.time is None
        return sum(
            (each.spent.usage for each in sub_agents if each.spent),
            (self.step.usage if self.step else Usage())
            + Usage(lower_bound=is_open or any(each.spent is None for each in sub_agents)),
        )


def split_time(activity: Activity, timing: StepTiming) -> TimeParts:
    """Return the parts of a completed LLM step; they sum to its total."""
    assert activity.closed_ns is not None, "only a completed step has parts"
    total_s = max(elapsed_s(activity.scheduled_ns, activity.closed_ns), timing.total_s)
    rest_s = total_s - timing.total_s
    backlog_s = min(_queued_s(activity), rest_s)
    return TimeParts(
        orchestration_s=rest_s - backlog_s,
        host_pre_s=timing.host_pre_s,
        ready_wait_s=timing.ready_wait_s + backlog_s,
        engine_queue_s=timing.engine_queue_s,
        prefill_s=timing.prefill_s,
        decode_s=timing.decode_s,
        host_post_s=timing.host_post_s,
    )


def _queued_s(activity: Activity) -> float:
    """Return the seconds on the task queue before the last attempt."""
    started_ns = activity.scheduled_ns if activity.started_ns is None else activity.started_ns
    return elapsed_s(activity.scheduled_ns, started_ns)


def turn_rows(
    found: Iterable[Activity], end_ns: int, *, over: bool, ledger: Mapping[str, Usage]
) -> list[TurnRow]:
    """Group activities into turns: each LLM step begins one, its calls follow it.

    `ledger` has the tokens of steps, by their ids, for those without a result.
    """
    turns: list[tuple[StepRow | None, list[Activity]]] = []
    sessions = Sessions()
    for activity in found:
        if activity.name == LLM_STEP and not activity.is_remote:
            row = _step_row(activity, end_ns, sessions, over=over, ledger=ledger)
            turns.append((row, []))
        elif activity.name in (CALL_TOOL, AGENT_WORKFLOW) or activity.is_remote:
            if not turns:
                turns.append((None, []))
            turns[-1][1].append(activity)
    rows: list[TurnRow] = []
    asked: dict[str, ToolCall] = {}
    for index, (step, calls) in enumerate(turns):
        asked.update({call.id: call for call in (step.tool_calls if step else ())})
        tools = tuple(_tool_row(call, end_ns, asked, over=over) for call in calls)
        busy_s = _busy_s(calls, end_ns)
        others = [call for call in calls if call.name != AGENT_WORKFLOW]
        rows.append(
            TurnRow(
                turn=index + 1,
                step=step,
                tools=tools,
                tool_s=max([busy_s, *(tool.total_s for tool in tools)]),
                sub_agent_s=max(0.0, busy_s - _busy_s(others, end_ns)),
            )
        )
    return rows


def _busy_s(calls: Sequence[Activity], end_ns: int) -> float:
    """Return the seconds during which at least one of the calls was in flight."""
    return covered_s((call.scheduled_ns, call.closed_ns or end_ns) for call in calls)


def _step_row(
    activity: Activity,
    end_ns: int,
    sessions: Sessions,
    *,
    over: bool,
    ledger: Mapping[str, Usage],
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
        usage = ledger.get(row.step_id, row.usage)
        known = {"usage": usage, "attainable_tokens": usage.cached_tokens}
        return row.model_copy(update=known)
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
            "backlog_s": max(0.0, time.ready_wait_s - result.timing.ready_wait_s),
            "unfinished_s": unfinished_s,
            "usage": result.usage,
            "attainable_tokens": sessions.attainable(asked, result),
            "finish_reason": result.finish_reason.value,
            "cohort_size": result.cohort_size,
            "replica": result.replica,
            "epoch": result.epoch,
            "diverged": result.diverged,
            "content": message.content if message else None,
            "tool_calls": message.tool_calls if message else (),
        }
    )


def _sub_agent_row(activity: Activity, end_ns: int, *, over: bool) -> ToolRow:
    """Return the row of a sub-agent's job, from what its caller's history says of it."""
    asked = parsed(AgentJobInput, activity.argument)
    result = parsed(AgentJobResult, activity.result)
    spent = parsed(Spent, activity.result)
    if result is not None:
        spent = Spent.model_validate(result.model_dump(include=set(Spent.model_fields)))
    return ToolRow(
        call_id=activity.activity_id,
        tool=asked.agent.name if asked else activity.name,
        arguments={TASK: asked.input} if asked else {},
        state=_state(activity, over=over),
        attempts=activity.attempts,
        failure=activity.failure,
        total_s=elapsed_s(activity.scheduled_ns, activity.closed_ns or end_ns),
        content=result.answer if result else None,
        sub_job=activity.activity_id,
        spent=spent,
    )


def _remote_row(
    activity: Activity, end_ns: int, calls: Mapping[str, ToolCall], *, over: bool
) -> ToolRow:
    """Return the row of a call that another worker ran; `calls` are those that were asked for."""
    call = calls.get(activity.activity_id)
    return ToolRow(
        call_id=activity.activity_id,
        tool=call.tool if call else activity.name,
        arguments=call.arguments if call else {},
        state=_state(activity, over=over),
        attempts=activity.attempts,
        failure=activity.failure,
        total_s=elapsed_s(activity.scheduled_ns, activity.closed_ns or end_ns),
        outcome=ToolOutcome.OK if activity.state is ActivityState.COMPLETED else None,
        content=_preview(activity.text),
    )


def _preview(text: str | None) -> str | None:
    """Return a result as a report holds it: of a large one its beginning."""
    if text is None or len(text) <= INLINE_RESULT_BYTES:
        return text
    return f"{text[:PREVIEW_CHARS]}…\n[of {len(text):,} characters; the history has the whole]"


def _tool_row(
    activity: Activity, end_ns: int, calls: Mapping[str, ToolCall], *, over: bool
) -> ToolRow:
    if activity.name == AGENT_WORKFLOW:
        return _sub_agent_row(activity, end_ns, over=over)
    if activity.is_remote:
        return _remote_row(activity, end_ns, calls, over=over)
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
        blob=result.blob if result else None,
    )


def _state(activity: Activity, *, over: bool) -> str:
    if over and activity.state is ActivityState.OPEN:
        return ActivityState.LOST.value
    return activity.state.value
