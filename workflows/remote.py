"""Tool calls that another worker runs, in any language: what it is handed, and what it returned."""

from __future__ import annotations

from pydantic_core import to_json
from temporalio import workflow
from temporalio.api.common.v1 import Payload
from temporalio.converter import DefaultPayloadConverter
from temporalio.worker import (
    Interceptor,
    StartActivityInput,
    WorkflowInboundInterceptor,
    WorkflowInterceptorClassInput,
    WorkflowOutboundInterceptor,
)

from contracts.agent import ToolRef
from contracts.limit import MAX_REMOTE_RESULT_BYTES
from contracts.tool import remote_text

IDEMPOTENCY_HEADER = "idempotency-key"
"""Temporal header of an activity whose id was chosen, which is the key; as JSON text."""


class RemoteResultError(Exception):
    """An activity returned what cannot be read as a tool's result; no attempt would mend it."""


def remote_answer(tool: ToolRef, payload: Payload) -> str:
    """Return what the model reads of an activity's result.

    Raises RemoteResultError for what is not JSON, or too large.
    """
    encoding = payload.metadata.get("encoding", b"").decode(errors="replace")
    if encoding == "binary/null":
        content = "null"
    elif not encoding.startswith("json/"):
        found = f"{encoding[:100]!r}, not JSON" if encoding else "no encoding"
        raise RemoteResultError(f"its activity returned a payload of {found}")
    else:
        try:
            content = remote_text(payload.data)
        except ValueError as error:
            raise RemoteResultError(f"its activity returned what is no JSON: {error}") from error
    size, limit = len(to_json(content)), min(tool.max_result_bytes, MAX_REMOTE_RESULT_BYTES)
    if size > limit:
        raise RemoteResultError(
            f"its activity's result has {size:,} bytes, the limit is {limit:,} bytes"
        )
    return content


class IdempotencyKeys(Interceptor):
    """Gives each activity that has an id of ours that id as a header, too."""

    def workflow_interceptor_class(
        self, _: WorkflowInterceptorClassInput
    ) -> type[WorkflowInboundInterceptor]:
        """Return what stands between a workflow and Temporal."""
        return _Inbound


class _Inbound(WorkflowInboundInterceptor):
    def init(self, outbound: WorkflowOutboundInterceptor) -> None:
        super().init(_Outbound(outbound))


class _Outbound(WorkflowOutboundInterceptor):
    def start_activity(self, call: StartActivityInput) -> workflow.ActivityHandle[object]:
        if call.activity_id is not None:
            [key] = DefaultPayloadConverter().to_payloads([call.activity_id])
            call.headers = {**call.headers, IDEMPOTENCY_HEADER: key}
        return super().start_activity(call)
