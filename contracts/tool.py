"""One tool call: what the workflow asks of a tool worker, and what comes back."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field
from pydantic_core import from_json, to_json

from contracts.agent import ToolRef
from contracts.message import BlobRef, Frozen, ToolCall, is_none


class ToolOutcome(StrEnum):
    """How a tool call that returns has ended; failures that fail the job are raised instead."""

    OK = "ok"
    ERROR = "error"
    """The tool said no, or failed for good and the model is to be told: `content` says why."""


class CallToolInput(Frozen):
    """Input of the `call_tool` activity. `call.id` is the idempotency key."""

    job_id: str
    call: ToolCall
    tool: ToolRef
    tenant: str = "default"


class CallToolResult(Frozen):
    """Result of the `call_tool` activity: `content` is what the model reads.

    Of a result over `INLINE_RESULT_BYTES` the model reads `blob`; `content` is its preview then.
    """

    call_id: str
    outcome: ToolOutcome
    content: str
    blob: BlobRef | None = Field(None, exclude_if=is_none)
    duration_s: float
    """Seconds inside the tool itself, in the attempt that counted."""


def remote_text(data: bytes) -> str:
    """Return what the model reads of a result in JSON: text as it is, all else as compact JSON.

    Raises ValueError for what is no JSON.
    """
    value = from_json(data)
    return value if isinstance(value, str) else to_json(value).decode()


class KeepResultInput(Frozen):
    """Input of the `keep_result` activity: a large result that another worker's activity gave."""

    content: str


class KeptResult(Frozen):
    """Result of the `keep_result` activity: what the store keeps, and a preview for people."""

    preview: str
    blob: BlobRef
