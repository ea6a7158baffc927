"""What a running job does now, in one line, as its open activities tell it."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError
from temporalio.api.workflow.v1 import PendingActivityInfo

from contracts.llm_step import StepHeartbeat, StepPhase
from contracts.name import CALL_TOOL, LLM_STEP, OPEN_JOB
from muster.history import failure_text, first_json

_NAMES = {LLM_STEP: "LLM step", CALL_TOOL: "tool call", OPEN_JOB: "opening the job"}


def doing(text: str, pending: Sequence[PendingActivityInfo]) -> str:
    """Return `text`, with what the open activities add: phase, place in line, attempt, failure."""
    notes = [note for each in pending if (note := _note(each))]
    return f"{text} ({'; '.join(notes)})" if notes else text


def _note(info: PendingActivityInfo) -> str:
    parts = [_phase(info)] if info.activity_type.name == LLM_STEP else []
    if info.attempt > 1:
        name = _NAMES.get(info.activity_type.name, info.activity_type.name)
        why = f" after {failure_text(info.last_failure)}" if info.HasField("last_failure") else ""
        parts.append(f"{name}: attempt {info.attempt}{why}")
    return ", ".join(part for part in parts if part)


def _phase(info: PendingActivityInfo) -> str:
    beat = first_json(info.heartbeat_details)
    if beat is None:
        return ""
    try:
        told = StepHeartbeat.model_validate_json(beat)
    except ValidationError:
        return ""
    if told.phase is StepPhase.QUEUED and told.place_in_line is not None:
        return f"queued, place {told.place_in_line} in line"
    if told.phase is StepPhase.DECODE:
        return f"decode, {told.completion_tokens} tokens"
    return told.phase.value
