"""Failures of activities, read: what they mean for the job, and the words people and models see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    ChildWorkflowError,
    FailureError,
    RetryState,
    TerminatedError,
    TimeoutType,
)
from temporalio.exceptions import (
    TimeoutError as ActivityTimeoutError,
)

from contracts.agent import SubAgent, ToolRef
from contracts.error import MusterError
from contracts.job import Spent, StopReason
from workflows import option
from workflows.remote import RemoteResultError
from workflows.text import MAX_ERROR_CHARS, one_line


class JobEndingError(MusterError):
    """The job is about to end."""


class LimitReachedError(Exception):
    """A limit of the agent forbids to go on; it never leaves the workflow."""

    def __init__(self, stop_reason: StopReason) -> None:
        super().__init__(stop_reason)
        self.stop_reason = stop_reason


class OutOfTimeError(LimitReachedError):
    """The job's wall time has ended, perhaps while an activity ran."""

    def __init__(self) -> None:
        super().__init__(StopReason.MAX_WALL_TIME)


def ran_out_of_time(error: ActivityError, *, has_queue_timeout: bool = False) -> bool:
    """Say whether an activity ended because its schedule-to-close timeout left no more room.

    That is also so when one more retry would not fit. Without a schedule-to-start timeout of its
    own, an activity that was never taken is reported under the name of that timeout all the same.
    """
    match _timeout(error):
        case TimeoutType.SCHEDULE_TO_CLOSE:
            return True
        case TimeoutType.SCHEDULE_TO_START:
            return not has_queue_timeout
        case _:
            return error.retry_state is RetryState.TIMEOUT


def lost_its_worker(error: ActivityError) -> bool:
    """Say whether an activity ended because the process that ran it fell silent."""
    return _timeout(error) is TimeoutType.HEARTBEAT


def _timeout(error: ActivityError) -> TimeoutType | None:
    return error.cause.type if isinstance(error.cause, ActivityTimeoutError) else None


def refusal(error: MusterError) -> ApplicationError:
    """Return the job failure for an error that workflow code itself raised."""
    return _failure(error.message, error.hint, type(error).__name__)


@contextmanager
def as_refusal() -> Iterator[None]:
    """Make an error of ours the refusal of an update, which fails no job."""
    try:
        yield
    except MusterError as error:
        raise refusal(error) from error


def open_job_failure(error: ActivityError) -> ApplicationError:
    """Return the job failure for an `open_job` that failed for good: its own words."""
    cause = error.cause
    if isinstance(cause, ApplicationError) and not ran_out_of_time(error):
        return _failure(_words(cause), _hint(cause.details), cause.type or "OpenJobFailedError")
    limit = _seconds(option.OPEN_JOB_TIMEOUT)
    return _failure(
        f"the job could not be opened within {limit}: {innermost(error)}",
        "look at the tool workers and the database with `muster doctor`",
        "OpenJobFailedError",
    )


def step_failure(step_id: str, error: ActivityError) -> ApplicationError:
    """Return the job failure for an LLM step that failed for good, with its message and hint."""
    cause = error.cause
    if isinstance(cause, ApplicationError):
        kind, hint = cause.type or "LLMStepFailedError", _hint(cause.details)
    else:
        kind, hint = "LLMStepFailedError", ""
    return _failure(f"LLM step {step_id} failed: {innermost(error)}", hint, kind)


def protocol_failure(step_id: str, found: str) -> ApplicationError:
    """Return the job failure for a step result that the step protocol does not allow."""
    return _failure(f"LLM step {step_id} returned {found}", "", "LLMStepFailedError")


def tool_failure(tool: ToolRef, error: ActivityError | RemoteResultError) -> ApplicationError:
    """Return the job failure for a tool whose policy is `fail_job`, naming tool and cause."""
    cause = error.cause if isinstance(error, ActivityError) else None
    hint = _hint(cause.details) if isinstance(cause, ApplicationError) else ""
    return _failure(
        f"tool {tool.tool_name!r} failed: {tool_cause(tool, error)}",
        hint or "set `on_failure: tell_model` for the tool to let the model go on without it",
        "ToolFailedError",
    )


def node_failure(node: str, why: str, job_id: str) -> ApplicationError:
    """Return the failure of a plan's job by one of its nodes, naming node and cause."""
    return _failure(
        f"node {node!r} failed: {why}",
        f"muster retry {job_id} runs it again; what is done is not done again",
        "NodeFailedError",
    )


def sub_agent_failure(sub_agent: SubAgent, error: ChildWorkflowError) -> ApplicationError:
    """Return the job failure for a sub-agent whose policy is `fail_job`, naming both."""
    hint = _hint(error.cause.details) if isinstance(error.cause, ApplicationError) else ""
    return _failure(
        f"sub-agent {sub_agent.name!r} failed: {sub_agent_cause(error)}",
        hint or "set `on_failure: tell_model` for it to let the model go on without it",
        "SubAgentFailedError",
    )


def sub_agent_cause(error: ChildWorkflowError) -> str:
    """Return why a sub-agent's job has ended without a result, in words for people and models."""
    if isinstance(error.cause, TerminatedError):
        return "its job was terminated from outside"
    if isinstance(error.cause, ActivityTimeoutError):
        return "its job ran out of time"
    return one_line(_words(error.cause) if error.cause else str(error), MAX_ERROR_CHARS)


def spent_by(error: ChildWorkflowError) -> Spent | None:
    """Return what a failed job tells that it had used; None if it could tell nothing."""
    details = error.cause.details if isinstance(error.cause, ApplicationError) else ()
    for detail in details:
        if isinstance(detail, dict) and "usage" in detail:
            return Spent.model_validate(detail)
    return None


def with_spent(error: ApplicationError, spent: Spent) -> ApplicationError:
    """Return a job's failure with what the job has used as its last detail."""
    return ApplicationError(
        error.message,
        *error.details,
        spent.model_dump(mode="json"),
        type=error.type,
        non_retryable=error.non_retryable,
    )


def tool_cause(tool: ToolRef, error: ActivityError | RemoteResultError) -> str:
    """Return why a tool call failed for good, in words for people and models."""
    if isinstance(error, RemoteResultError):
        return one_line(str(error), MAX_ERROR_CHARS)
    cause = error.cause
    tries = ""
    if error.retry_state is RetryState.MAXIMUM_ATTEMPTS_REACHED and tool.retry.max_attempts > 1:
        tries = f" ({tool.retry.max_attempts} attempts)"
    if not isinstance(cause, ActivityTimeoutError):
        return innermost(error) + tries
    match cause.type:
        case TimeoutType.START_TO_CLOSE:
            text = f"it took longer than its timeout of {_seconds(tool.timeout)}"
        case TimeoutType.SCHEDULE_TO_START:
            wait = _seconds(tool.queue_timeout)
            text = f"no worker took it from task queue {tool.queue!r} within its queue_timeout "
            text += f"of {wait}"
        case TimeoutType.HEARTBEAT:
            beat = tool.activity.heartbeat if tool.activity else None
            silence = _seconds(beat or option.HEARTBEAT_TIMEOUT)
            text = f"its worker was lost (no heartbeat for {silence})"
        case _:
            text = cause.message
    return text + tries


def innermost(error: ActivityError) -> str:
    """Return the words of what ended an activity; behind a timeout, those of the last attempt."""
    cause: BaseException | None = error.cause
    if isinstance(cause, ActivityTimeoutError) and isinstance(cause.cause, ApplicationError):
        cause = cause.cause
    return one_line(_words(cause) if cause else str(error), MAX_ERROR_CHARS)


def _words(cause: BaseException) -> str:
    """Return a failure's message, without the hint where its details hold the two apart."""
    if isinstance(cause, ApplicationError):
        for detail in cause.details:
            if isinstance(detail, dict) and detail.get("message"):
                return str(detail["message"])
    return cause.message if isinstance(cause, FailureError) else str(cause)


def _failure(message: str, hint: str, kind: str) -> ApplicationError:
    details = (hint[:MAX_ERROR_CHARS],) if hint else ()
    return ApplicationError(message[:MAX_ERROR_CHARS], *details, type=kind, non_retryable=True)


def _hint(details: Sequence[Any]) -> str:
    """Return the hint among an error's details: their first text, or a mapping's `hint`."""
    for detail in details:
        if isinstance(detail, str):
            return detail
        if isinstance(detail, dict) and detail.get("hint"):
            return str(detail["hint"])
    return ""


def _seconds(duration: timedelta) -> str:
    return f"{duration.total_seconds():g} s"
