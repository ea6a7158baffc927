"""What a Temporal history says of each activity: when it was asked for, tried and over, and how.

Works on the history of one run, whole or cut off anywhere. Times are the server's event times, in
nanoseconds since the epoch; the server's clock may jump, so differences are taken by `elapsed_s`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from temporalio.api.common.v1 import Payload, Payloads
from temporalio.api.enums.v1 import EventType, TimeoutType
from temporalio.api.failure.v1 import Failure
from temporalio.api.history.v1 import HistoryEvent
from temporalio.api.workflow.v1 import PendingActivityInfo

from contracts.name import AGENT_WORKFLOW
from contracts.tool import remote_text

M = TypeVar("M", bound=BaseModel)


class ActivityState(StrEnum):
    """How an activity stands: open, or how it closed."""

    OPEN = "open"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    CANCELLED = "cancelled"
    LOST = "lost"
    """The job was over before the activity was: it was terminated, or ran out of time."""


@dataclass(frozen=True, slots=True)
class Activity:
    """One activity of one run, all its attempts together; or a sub-agent's job, as its caller's.

    A failed sub-agent's `result` is what it had used. `activity_id` is its job id.

    `started_ns` is the start of the last attempt, known once the activity is closed; `attempts` is
    the number of that attempt (0: none is known to have started). `failure` is the text of what
    closed it, or of the last attempt that failed before the one that counted.
    """

    activity_id: str
    name: str
    argument: bytes
    """JSON of the first argument."""
    scheduled_ns: int
    state: ActivityState = ActivityState.OPEN
    started_ns: int | None = None
    closed_ns: int | None = None
    attempts: int = 0
    result: bytes | None = None
    failure: str | None = None

    @property
    def is_remote(self) -> bool:
        """Whether it is a call that somebody else's worker runs.

        Then its id is the call's; those of our own activities are numbers.
        """
        return self.name != AGENT_WORKFLOW and not self.activity_id.isdigit()

    @property
    def text(self) -> str | None:
        """What the model reads of its result, if that is JSON."""
        if self.result is None:
            return None
        try:
            return remote_text(self.result)
        except ValueError:
            return None


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job, as far as it has come."""

    run_id: str
    events: Sequence[HistoryEvent]

    @property
    def previous_run_id(self) -> str:
        """The run that continued as this one, or an empty text."""
        started = self.events[0].workflow_execution_started_event_attributes
        return started.continued_execution_run_id


_TIMEOUTS: Mapping[int, str] = {
    TimeoutType.TIMEOUT_TYPE_START_TO_CLOSE: "one attempt took longer than its limit",
    TimeoutType.TIMEOUT_TYPE_SCHEDULE_TO_START: "no worker took it in time",
    TimeoutType.TIMEOUT_TYPE_SCHEDULE_TO_CLOSE: "all attempts together took longer than the limit",
    TimeoutType.TIMEOUT_TYPE_HEARTBEAT: "its worker gave no sign of life",
}


def elapsed_s(start_ns: int, end_ns: int) -> float:
    """Return the seconds from start to end, 0 if the clock went back between."""
    return max(0, end_ns - start_ns) / 1e9


def covered_s(spans: Iterable[tuple[int, int]]) -> float:
    """Return the seconds that spans of nanoseconds cover together, each moment counted once."""
    covered_ns, reached_ns = 0, 0
    for start_ns, stop_ns in sorted(spans):
        covered_ns += max(0, stop_ns - max(start_ns, reached_ns))
        reached_ns = max(reached_ns, stop_ns)
    return covered_ns / 1e9


def failure_text(failure: Failure) -> str:
    """Return a failure in one line, `Type: message`, without the SDK's wrappers around it."""
    failure = _unwrapped(failure)
    message = " ".join(failure.message.split())
    match failure.WhichOneof("failure_info"):
        case "timeout_failure_info":
            why = _TIMEOUTS.get(failure.timeout_failure_info.timeout_type, message)
            if failure.HasField("cause"):
                return f"timed out: {why}; last failure: {failure_text(failure.cause)}"
            return f"timed out: {why}"
        case "application_failure_info" if failure.application_failure_info.type:
            return f"{failure.application_failure_info.type}: {message}"
        case kind:
            return message or (kind or "unknown failure").removesuffix("_info").replace("_", " ")


def failure_hint(failure: Failure) -> str | None:
    """Return the hint that came with a failure: the first text among its details."""
    details = _unwrapped(failure).application_failure_info.details.payloads
    for detail in map(payload_json, details):
        text = json.loads(detail) if detail else None
        if isinstance(text, dict):
            text = text.get("hint")
        if isinstance(text, str) and text:
            return " ".join(text.split())
    return None


def _unwrapped(failure: Failure) -> Failure:
    """Return the failure that an activity's or a child's failure only reports."""
    while failure.HasField("cause") and (
        failure.HasField("activity_failure_info")
        or failure.HasField("child_workflow_execution_failure_info")
    ):
        failure = failure.cause
    return failure


def first_json(payloads: Payloads) -> bytes | None:
    """Return the first payload's JSON, or None if there is none."""
    return payload_json(payloads.payloads[0]) if payloads.payloads else None


def last_json(payloads: Payloads) -> bytes | None:
    """Return the last payload's JSON, or None if there is none."""
    return payload_json(payloads.payloads[-1]) if payloads.payloads else None


def payload_json(payload: Payload) -> bytes | None:
    """Return a payload's JSON, or None if it holds none (binary, null)."""
    return payload.data if payload.metadata.get("encoding") == b"json/plain" else None


def parsed(model: type[M], data: bytes | None) -> M | None:
    """Return a contract from its JSON; None if there is none, or another version wrote it."""
    if data is None:
        return None
    try:
        return model.model_validate_json(data)
    except ValidationError:
        return None


def activities(
    events: Iterable[HistoryEvent], pending: Iterable[PendingActivityInfo] = ()
) -> list[Activity]:
    """Return a run's activities in the order in which they were scheduled.

    Temporal writes the attempts of an activity into history when it closes; `pending`, from the
    description of a job that runs, tells those of the open ones.
    """
    by_event: dict[int, Activity] = {}
    for event in events:
        if event.HasField("activity_task_scheduled_event_attributes"):
            asked = event.activity_task_scheduled_event_attributes
            found = asked.activity_id, asked.activity_type.name, asked.input
            by_event[event.event_id] = _scheduled(event, *found)
        elif event.HasField("activity_task_started_event_attributes"):
            _start(by_event, event)
        elif event.HasField("start_child_workflow_execution_initiated_event_attributes"):
            child = event.start_child_workflow_execution_initiated_event_attributes
            found = child.workflow_id, child.workflow_type.name, child.input
            by_event[event.event_id] = _scheduled(event, *found)
        elif event.HasField("child_workflow_execution_started_event_attributes"):
            began = event.child_workflow_execution_started_event_attributes
            if began.initiated_event_id in by_event:
                activity = by_event[began.initiated_event_id]
                by_event[began.initiated_event_id] = replace(
                    activity, started_ns=time_ns(event), attempts=1
                )
        elif (closing := _close(event)) is not None:
            scheduled, closed = closing
            if scheduled in by_event:
                by_event[scheduled] = _closed(by_event[scheduled], closed, time_ns(event))
    open_now = {each.activity_id: each for each in pending}
    return [
        _with_attempts(each, open_now[each.activity_id])
        if each.state is ActivityState.OPEN and each.activity_id in open_now
        else each
        for each in by_event.values()
    ]


def time_ns(event: HistoryEvent) -> int:
    """Return an event's time in nanoseconds since the epoch."""
    return event.event_time.ToNanoseconds()


def _scheduled(event: HistoryEvent, activity_id: str, name: str, given: Payloads) -> Activity:
    return Activity(
        activity_id=activity_id,
        name=name,
        argument=first_json(given) or b"null",
        scheduled_ns=time_ns(event),
    )


def _with_attempts(activity: Activity, info: PendingActivityInfo) -> Activity:
    failed = info.HasField("last_failure")
    return replace(
        activity,
        attempts=info.attempt,
        failure=failure_text(info.last_failure) if failed else None,
    )


def _start(by_event: dict[int, Activity], event: HistoryEvent) -> None:
    started = event.activity_task_started_event_attributes
    activity = by_event.get(started.scheduled_event_id)
    if activity is None:
        return
    failed_before = started.HasField("last_failure")
    by_event[started.scheduled_event_id] = replace(
        activity,
        started_ns=time_ns(event),
        attempts=started.attempt,
        failure=failure_text(started.last_failure) if failed_before else None,
    )


@dataclass(frozen=True, slots=True)
class _Closing:
    state: ActivityState
    result: bytes | None = None
    failure: str | None = None


def _close(event: HistoryEvent) -> tuple[int, _Closing] | None:
    """Return the scheduled event's id and how the activity closed, if `event` closes one."""
    match event.event_type:
        case EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED:
            done = event.activity_task_completed_event_attributes
            closing = _Closing(ActivityState.COMPLETED, result=first_json(done.result))
            return done.scheduled_event_id, closing
        case EventType.EVENT_TYPE_ACTIVITY_TASK_FAILED:
            failed = event.activity_task_failed_event_attributes
            text = failure_text(failed.failure)
            return failed.scheduled_event_id, _Closing(ActivityState.FAILED, failure=text)
        case EventType.EVENT_TYPE_ACTIVITY_TASK_TIMED_OUT:
            late = event.activity_task_timed_out_event_attributes
            text = failure_text(late.failure)
            return late.scheduled_event_id, _Closing(ActivityState.TIMED_OUT, failure=text)
        case EventType.EVENT_TYPE_ACTIVITY_TASK_CANCELED:
            cancelled = event.activity_task_canceled_event_attributes
            return cancelled.scheduled_event_id, _Closing(ActivityState.CANCELLED)
        case _:
            return _close_child(event)


def _close_child(event: HistoryEvent) -> tuple[int, _Closing] | None:
    """Return the initiating event's id and how the child workflow closed, if `event` closes one."""
    match event.event_type:
        case EventType.EVENT_TYPE_CHILD_WORKFLOW_EXECUTION_COMPLETED:
            done = event.child_workflow_execution_completed_event_attributes
            closing = _Closing(ActivityState.COMPLETED, result=first_json(done.result))
            return done.initiated_event_id, closing
        case EventType.EVENT_TYPE_CHILD_WORKFLOW_EXECUTION_FAILED:
            failed = event.child_workflow_execution_failed_event_attributes
            details = failed.failure.application_failure_info.details
            closing = _Closing(
                ActivityState.FAILED,
                result=last_json(details),
                failure=failure_text(failed.failure),
            )
            return failed.initiated_event_id, closing
        case EventType.EVENT_TYPE_CHILD_WORKFLOW_EXECUTION_CANCELED:
            cancelled = event.child_workflow_execution_canceled_event_attributes
            return cancelled.initiated_event_id, _Closing(ActivityState.CANCELLED)
        case EventType.EVENT_TYPE_CHILD_WORKFLOW_EXECUTION_TERMINATED:
            terminated = event.child_workflow_execution_terminated_event_attributes
            closing = _Closing(ActivityState.FAILED, failure="terminated from outside")
            return terminated.initiated_event_id, closing
        case EventType.EVENT_TYPE_CHILD_WORKFLOW_EXECUTION_TIMED_OUT:
            late = event.child_workflow_execution_timed_out_event_attributes
            closing = _Closing(ActivityState.TIMED_OUT, failure="ran out of time")
            return late.initiated_event_id, closing
        case EventType.EVENT_TYPE_START_CHILD_WORKFLOW_EXECUTION_FAILED:
            refused = event.start_child_workflow_execution_failed_event_attributes
            closing = _Closing(ActivityState.FAILED, failure="its job could not be started")
            return refused.initiated_event_id, closing
        case _:
            return None


def _closed(activity: Activity, closing: _Closing, at_ns: int) -> Activity:
    return replace(
        activity,
        state=closing.state,
        closed_ns=at_ns,
        result=closing.result,
        failure=closing.failure or activity.failure,
    )
