"""What people decide on calls: what may be decided, what waits, what the model reads of it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from contracts.agent import AgentSpec
from contracts.approval import (
    Approval,
    Decision,
    JobWaits,
    Pause,
    PauseRequest,
    PendingApproval,
    Verdict,
)
from contracts.error import BadInputError
from contracts.job import JobProgress
from contracts.name import (
    WAITS_FOR_ANYONE,
    WAITS_FOR_APPROVAL,
    WAITS_FOR_RESUME,
    waits_for_person,
)
from workflows.state import ApprovalRequest, JobState, OpenCall
from workflows.text import arguments_line, one_line

MAX_SEARCHED_NAMES = 100
"""People by whom a job can be found while it waits; where more may decide, by `anyone`."""

MAX_CALLS_IN_HINT = 5

EXPIRY = "nobody has approved it within"
"""By this a denial that people did not give is known."""


def policies(agent: AgentSpec) -> dict[str, Approval]:
    """Return the approval policy of each tool and sub-agent that has one."""
    return {each.tool_name: policy for each in agent.callables if (policy := each.approval_policy)}


def _policy(each: OpenCall, known: Mapping[str, Approval]) -> Approval:
    return each.policy or known[each.call.tool]


def check_decision(decision: Decision, agent: AgentSpec, state: JobState, now: datetime) -> None:
    """Refuse a decision that cannot count; raises `BadInputError`. One that came before may."""
    if decision.id in state.seen_decisions:
        return
    found = [each for each in state.calls if each.request and each.call.id == decision.call_id]
    if not found:
        raise BadInputError(
            f"no call {one_line(decision.call_id)!r} waits for approval", hint=_waiting_calls(state)
        )
    call, request = found[0], found[0].request
    assert request is not None
    shown = f"call {call.call.id!r} of {call.call.tool}"
    if request.verdict is not None:
        raise BadInputError(f"{shown} is decided already: {outcome(request)}")
    if call.answer is not None or (request.expires_at and now >= request.expires_at):
        raise BadInputError(f"{shown} was not decided in time: it counts as denied")
    policy = _policy(call, policies(agent))
    if policy.by and decision.by not in policy.by:
        raise BadInputError(
            f"{decision.by!r} may not decide on {shown}",
            hint=f"these may: {', '.join(policy.by)}",
        )
    if decision.verdict is Verdict.APPROVE and decision.by in request.approved_by:
        raise BadInputError(
            f"{decision.by!r} has approved {shown} already; {policy.people} different people must",
        )


def take_decision(decision: Decision, agent: AgentSpec, state: JobState) -> None:
    """Count a decision that was checked; one that came before changes nothing."""
    if state.has_seen(decision.id):
        return
    for each in state.calls:
        if each.is_waiting and each.call.id == decision.call_id:
            assert each.request is not None
            each.request.take(decision, _policy(each, policies(agent)).people)
            return


def check_pause(request: PauseRequest, state: JobState) -> None:
    """Refuse to pause a paused job; raises `BadInputError`."""
    if state.paused and request.id not in state.seen_decisions:
        raise BadInputError(f"the job is paused already, by {state.paused.by}")


def check_resume(request: PauseRequest, state: JobState) -> None:
    """Refuse to resume a job that is not paused; raises `BadInputError`."""
    if not state.paused and request.id not in state.seen_decisions:
        raise BadInputError("the job is not paused")


def take_pause(request: PauseRequest, state: JobState, now: datetime) -> None:
    """Pause the job; a request that came before changes nothing."""
    if not state.has_seen(request.id):
        state.paused = Pause(at=now, by=request.by, reason=request.reason)


def take_resume(request: PauseRequest, state: JobState) -> None:
    """End the pause; a request that came before changes nothing."""
    if not state.has_seen(request.id):
        state.paused = None


def outcome(request: ApprovalRequest) -> str:
    """Return how a decided request ended, and by whom."""
    if request.verdict is Verdict.DENY:
        return f"denied by {request.denied_by}"
    return f"approved by {', '.join(request.approved_by)}"


def denial(tool: str, request: ApprovalRequest) -> str:
    """Return what the model reads of a call that people have not approved."""
    if request.verdict is Verdict.DENY:
        why = f": {request.reason}" if request.reason else ""
        return f"error: {tool} was not called: {request.denied_by} denied it{why}"
    assert request.expires_at is not None
    waited_s = (request.expires_at - request.asked_at).total_seconds()
    return f"error: {tool} was not called: {EXPIRY} {waited_s:g} s"


def is_expiry(tool: str, content: str) -> bool:
    """Say whether the model reads that nobody has decided on a call in time."""
    return content.startswith(f"error: {tool} was not called: {EXPIRY} ")


def progress(job_id: str, state: JobState) -> JobProgress:
    """Return what the job is doing now, and what it waits for that only people can give."""
    return state.progress().model_copy(update={"waits": doing(job_id, state)})


def waits(agent: AgentSpec, state: JobState) -> JobWaits:
    """Return what the job waits for that only people can give."""
    known = policies(agent)
    return JobWaits(
        pending=tuple(_pending(each, _policy(each, known)) for each in _waiting(state)),
        paused=state.paused,
    )


def waiting_for(agent: AgentSpec, state: JobState) -> list[str]:
    """Return what the job can be found by while it waits for people."""
    found: set[str] = set()
    known = policies(agent)
    for each in _waiting(state):
        assert each.request is not None
        by = _policy(each, known).by
        left = [name for name in by if name not in each.request.approved_by]
        found |= {WAITS_FOR_APPROVAL, *(map(waits_for_person, left) if by else [WAITS_FOR_ANYONE])}
    if len(found) > MAX_SEARCHED_NAMES:
        found = {WAITS_FOR_APPROVAL, WAITS_FOR_ANYONE}
    if state.paused:
        found.add(WAITS_FOR_RESUME)
    return sorted(found)


def doing(job_id: str, state: JobState) -> str:
    """Return one line on what the job waits for, and how people go on; no text for nothing."""
    if state.paused:
        return f"paused by {state.paused.by}: muster resume {job_id}"
    calls = _waiting(state)
    if len(calls) == 1:
        [each] = calls
        call = f"{each.call.tool}({arguments_line(each.call)})"
        return f"waiting for approval of {one_line(call)}: muster approve {job_id}"
    if not calls:
        return ""
    names = one_line(", ".join(each.call.tool for each in calls))
    return f"waiting for approval of {len(calls)} calls: {names}: muster approvals"


def _waiting(state: JobState) -> list[OpenCall]:
    return [each for each in state.calls if each.is_waiting]


def _pending(each: OpenCall, policy: Approval) -> PendingApproval:
    request = each.request
    assert request is not None
    return PendingApproval(
        call_id=each.call.id,
        tool=each.call.tool,
        arguments=one_line(arguments_line(each.call)),
        asked_at=request.asked_at,
        expires_at=request.expires_at,
        people=policy.people,
        by=policy.by,
        approved_by=tuple(request.approved_by),
        note=request.note,
    )


def _waiting_calls(state: JobState) -> str:
    ids = [each.call.id for each in _waiting(state)]
    if not ids:
        return "none waits now; it may have been decided, or its turn is over"
    more = ", …" if len(ids) > MAX_CALLS_IN_HINT else ""
    return f"these wait: {', '.join(ids[:MAX_CALLS_IN_HINT])}{more}"
