"""Messages, decisions and pauses for running jobs: sent until the job has them, taken once."""

from __future__ import annotations

import asyncio
import getpass
from datetime import timedelta
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError
from temporalio.client import (
    WorkflowExecutionStatus,
    WorkflowHandle,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from contracts.approval import Decision, PauseRequest, PersonName, Verdict
from contracts.error import BadInputError, LimitExceededError, UnavailableError
from contracts.job import JobMessage
from contracts.limit import MAX_REASON_CHARS
from muster.job_error import explained
from muster.job_row import row_of

PATIENCE = timedelta(seconds=30)
"""How long an update is sent again while nobody takes it."""

ATTEMPT_TIMEOUT = timedelta(seconds=5)
RETRY_S = 0.1

_PERSON: TypeAdapter[str] = TypeAdapter(PersonName)

_OVER = "AcceptedUpdateCompletedWorkflow"
"""Temporal's failure of an update whose run ended; the job may go on in another."""


def new_decision(call_id: str, verdict: Verdict, *, by: str, reason: str = "") -> Decision:
    """Return a decision with an id of its own; raises as `check_words` does."""
    check_words(by, reason)
    return Decision(id=uuid4().hex, call_id=call_id, verdict=verdict, by=by, reason=reason)


def new_pause(*, by: str, reason: str = "") -> PauseRequest:
    """Return a request to pause or resume; raises as `check_words` does."""
    check_words(by, reason)
    return PauseRequest(id=uuid4().hex, by=by, reason=reason)


def check_words(by: str, reason: str) -> None:
    """Refuse what no job takes from people; raises `BadInputError` or `LimitExceededError`."""
    if len(reason) > MAX_REASON_CHARS:
        raise LimitExceededError(
            "the reason", len(reason), MAX_REASON_CHARS, "characters", hint="make it shorter"
        )
    try:
        _PERSON.validate_python(by)
    except ValidationError:
        raise BadInputError(
            f"{by[:80]!r} is not the name of a person",
            hint="--by NAME: 1 to 64 characters, no spaces, quotes, commas or |",
        ) from None


def current_person() -> str:
    """Return the name under which the caller decides: that of their account on this machine."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # an account without a name
        name = ""
    if not name:
        raise BadInputError("your account has no name here", hint="say who you are with --by")
    return name


async def deliver(
    handle: WorkflowHandle[object, object],
    name: str,
    value: JobMessage | Decision | PauseRequest,
    what: str,
    *,
    again: str = "again",
) -> None:
    """Send the update `name` until the job has it.

    `what` names it to people, `again` says how they send it once more. A job that rolls over is
    away for a moment: the update finds its next run. Raises `BadInputError` if the job refuses it
    or has ended, `UnavailableError` if nobody takes it.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + PATIENCE.total_seconds()
    while True:
        try:
            await handle.execute_update(name, value, id=value.id, rpc_timeout=ATTEMPT_TIMEOUT)
            return
        except WorkflowUpdateFailedError as error:
            cause = error.cause
            if not isinstance(cause, ApplicationError) or cause.type != _OVER:
                raise _refused(handle.id, what, cause) from None
        except WorkflowUpdateRPCTimeoutOrCancelledError:
            pass
        except RPCError as error:
            if error.status is RPCStatusCode.INVALID_ARGUMENT:
                raise _refused(handle.id, what, error) from None
        await _check_running(handle)
        if loop.time() > until_s:
            raise UnavailableError(
                f"job {handle.id} has not taken the {what} for {PATIENCE.total_seconds():.0f} s",
                hint=f"muster doctor, then send it {again}",
            )
        await asyncio.sleep(RETRY_S)


async def _check_running(handle: WorkflowHandle[object, object]) -> None:
    """Raise `BadInputError` if the job does not exist or has ended."""
    with explained(handle.id):
        described = await handle.describe()
    running = (WorkflowExecutionStatus.RUNNING, WorkflowExecutionStatus.CONTINUED_AS_NEW)
    if described.status not in running:
        raise BadInputError(
            f"job {handle.id} has ended: {row_of(described).status}",
            hint=f"muster show {handle.id}",
        )


def _refused(job_id: str, what: str, cause: BaseException | None) -> BadInputError:
    details = cause.details if isinstance(cause, ApplicationError) else ()
    hint = next((detail for detail in details if isinstance(detail, str)), "")
    message = getattr(cause, "message", str(cause))
    return BadInputError(
        f"job {job_id} does not take the {what}: {message}", hint=hint or f"muster show {job_id}"
    )
