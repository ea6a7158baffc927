"""Messages to running jobs."""

from __future__ import annotations

from uuid import uuid4

from temporalio.client import WorkflowHandle

from contracts.error import LimitExceededError
from contracts.job import JobMessage
from contracts.limit import MAX_MESSAGE_ID_CHARS
from contracts.name import MESSAGE_UPDATE
from muster.job_input import check_input
from muster.job_update import deliver


def new_message(text: str, message_id: str | None) -> JobMessage:
    """Return a message with an id of its own; raises `BadInputError` for a bad text or id."""
    if message_id is not None and not 1 <= len(message_id) <= MAX_MESSAGE_ID_CHARS:
        raise LimitExceededError(
            "the message's id", len(message_id), MAX_MESSAGE_ID_CHARS, "characters",
            hint="choose a shorter id, or leave it out",
        )  # fmt: skip
    return JobMessage(id=message_id or uuid4().hex, text=check_input(text, "message"))


async def send_message(handle: WorkflowHandle[object, object], message: JobMessage) -> None:
    """Send a message until the job has it; raises what `deliver` raises."""
    await deliver(handle, MESSAGE_UPDATE, message, "message", again=f"again with --id {message.id}")
