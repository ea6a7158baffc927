"""What people have decided on a job's calls, and how they paused it, as history tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from temporalio.api.history.v1 import HistoryEvent

from contracts.agent import AgentSpec
from contracts.approval import Decision, PauseRequest, Verdict
from contracts.llm_step import LLMStepInput
from contracts.message import Frozen, ToolCall
from contracts.name import DECIDE_UPDATE, LLM_STEP, PAUSE_UPDATE, RESUME_UPDATE
from muster.history import first_json, parsed, time_ns
from workflows.decision import EXPIRY, is_expiry, policies
from workflows.text import arguments_line, one_line


class DecisionKind(StrEnum):
    """What was decided; a call that nobody decided in time has expired, which denies it."""

    APPROVED = "approved"
    DENIED = "denied"
    EXPIRED = "expired"
    PAUSED = "paused"
    RESUMED = "resumed"


class DecisionRow(Frozen):
    """One decision: when, what, by whom, why; and on which call, unless it is on the whole job.

    An approval counts as number `approvals` of the `people` that the call needs. `at` of what has
    expired is when the job went on.
    """

    at: datetime
    kind: DecisionKind
    by: str | None = None
    reason: str = ""
    call_id: str | None = None
    tool: str | None = None
    arguments: str | None = None
    """On one line, shortened."""
    approvals: int | None = None
    people: int | None = None


@dataclass(frozen=True, slots=True)
class _Taken:
    """What people gave a job as it took it, or that a call has expired."""

    at_ns: int
    kind: DecisionKind
    id: str
    by: str | None = None
    reason: str = ""
    call_id: str | None = None


class Decided:
    """The decisions on a job, in order, as its runs tell one after the other."""

    def __init__(self) -> None:
        self._taken: dict[str, _Taken] = {}

    def follow(self, events: Sequence[HistoryEvent]) -> None:
        """Take in the history of the next run; what was sent again under its id counts once."""
        for event in events:
            if taken := _update(event):
                self._taken.setdefault(taken.id, taken)
            for call_id in _expired(event):
                taken = _Taken(time_ns(event), DecisionKind.EXPIRED, call_id, call_id=call_id)
                self._taken.setdefault(call_id, taken)

    def rows(
        self, agent: AgentSpec | None, calls: Mapping[str, ToolCall]
    ) -> tuple[DecisionRow, ...]:
        """Return all decisions; `agent` has its servers' tools pinned, `calls` are by their ids."""
        known = policies(agent) if agent else {}
        approvals: Counter[str] = Counter()
        rows: list[DecisionRow] = []
        for taken in self._taken.values():
            call = calls.get(taken.call_id) if taken.call_id else None
            policy = known.get(call.tool) if call else None
            number = None
            if taken.kind is DecisionKind.APPROVED and taken.call_id:
                approvals[taken.call_id] += 1
                number = approvals[taken.call_id]
            rows.append(
                DecisionRow(
                    at=datetime.fromtimestamp(taken.at_ns / 1e9, UTC),
                    kind=taken.kind,
                    by=taken.by,
                    reason=taken.reason,
                    call_id=taken.call_id,
                    tool=call.tool if call else None,
                    arguments=one_line(arguments_line(call)) if call else None,
                    approvals=number,
                    people=policy.people if policy and number else None,
                )
            )
        return tuple(rows)


def _update(event: HistoryEvent) -> _Taken | None:
    """Return what people gave a job with this event."""
    update = event.workflow_execution_update_accepted_event_attributes.accepted_request.input
    at_ns, raw = time_ns(event), first_json(update.args)
    if update.name == DECIDE_UPDATE and (given := parsed(Decision, raw)):
        is_approval = given.verdict is Verdict.APPROVE
        kind = DecisionKind.APPROVED if is_approval else DecisionKind.DENIED
        return _Taken(at_ns, kind, given.id, given.by, given.reason, given.call_id)
    if update.name in (PAUSE_UPDATE, RESUME_UPDATE) and (asked := parsed(PauseRequest, raw)):
        is_pause = update.name == PAUSE_UPDATE
        kind = DecisionKind.PAUSED if is_pause else DecisionKind.RESUMED
        return _Taken(at_ns, kind, asked.id, asked.by, asked.reason)
    return None


def _expired(event: HistoryEvent) -> list[str]:
    """Return the calls of which an LLM step is told with this event that nobody decided them."""
    asked = event.activity_task_scheduled_event_attributes
    if asked.activity_type.name != LLM_STEP:
        return []
    raw = first_json(asked.input)
    if raw is None or EXPIRY.encode() not in raw:
        return []
    step = parsed(LLMStepInput, raw)
    return [
        message.tool_call_id
        for message in (step.append if step else ())
        if message.tool_call_id and is_expiry(message.tool or "", message.content)
    ]
