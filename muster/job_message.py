"""Messages to running jobs: sent until the job has them, and taken once."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import uuid4

from temporalio.client import (
    WorkflowExecutionStatus,
    WorkflowHandle,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from contracts.error import BadInputError, LimitExceededError, UnavailableError
from contracts.job import JobMessage
from contracts.limit import MAX_MESSAGE_ID_CHARS
from contracts.name import MESSAGE_UPDATE
from muster.job_error import explained
from muster.job_input import check_input
from muster.job_row import row_of

PATIENCE = timedelta(seconds=30)
"""How long a message is sent again while nobody takes it."""

ATTEMPT_TIMEOUT = timedelta(seconds=5)
RETRY_S = 0.1

_OVER = "AcceptedUpdateCompletedWorkflow"
"""Temporal's failure of an update whose run ended; the job may go on in another."""


def new_message(text: str, message_id: str | None) -> JobMessage:
    """Return a message with an id of its own; raises `BadInputError` for a bad text or id."""
    if message_id is not None and not 1 <= len(message_id) <= MAX_MESSAGE_ID_CHARS:
        raise LimitExceededError(
            "the message's id", len(message_id), MAX_MESSAGE_ID_CHARS, "characters",
            hint="choose a shorter id, or leave it out",
        )  # fmt: skip
    return JobMessage(id=message_id or uuid4().hex, text=check_input(text, "message"))


async def send_message(handle: WorkflowHandle[object, object], message: JobMessage) -> None:
    """Send a message until the job has it.

    A job that rolls over is away for a moment: the message finds its next run. Raises
    `BadInputError` if the job refuses it or has ended, `UnavailableError` if nobody takes it.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + PATIENCE.total_seconds()
    while True:
        try:
            await handle.execute_update(
                MESSAGE_UPDATE, message, id=message.id, rpc_timeout=ATTEMPT_TIMEOUT
            )
            return
        except WorkflowUpdateFailedError as error:
            cause = error.cause
            if not isinstance(cause, ApplicationError) or cause.type != _OVER:
                raise _refused(handle.id, cause) from None
        except WorkflowUpdateRPCTimeoutOrCancelledError:
            pass
        except RPCError as error:
            if error.status is RPCStatusCode.INVALID_ARGUMENT:
                raise _refused(handle.id, error) from None
        await _check_running(handle)
        if loop.time() > until_s:
            raise UnavailableError(
                f"job {handle.id} has not taken the message for {PATIENCE.total_seconds():.0f} s",
                hint=f"muster doctor, then send it again with --id {message.id}",
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


def _refused(job_id: str, cause: BaseException | None) -> BadInputError:
    details = cause.details if isinstance(cause, ApplicationError) else ()
    hint = next((detail for detail in details if isinstance(detail, str)), "")
    message = getattr(cause, "message", str(cause))
    return BadInputError(
        f"job {job_id} does not take the message: {message}", hint=hint or f"muster show {job_id}"
    )
