"""Limits: which of the agent's is reached, and which input is too large to start with."""

from __future__ import annotations

from datetime import datetime

from pydantic_core import to_json

from contracts.agent import Limits
from contracts.error import BadInputError, LimitExceededError
from contracts.job import AgentJobInput, StopReason
from contracts.limit import MAX_INPUT_BYTES, MAX_START_BYTES
from contracts.llm_step import Usage
from workflows.state import JobState

MAX_TENANT_BYTES = 64
"""A tenant is Temporal's fairness key, which may not be longer."""

MAX_JOB_ID_CHARS = 180
"""A step id is the job id, a branch and a counter, together at most 200 characters."""


def check_input(job_id: str, job: AgentJobInput) -> None:
    """Refuse what Temporal would refuse later, again and again.

    Raises `LimitExceededError` or `BadInputError`.
    """
    _at_most("job id", len(job_id), MAX_JOB_ID_CHARS, "characters")
    _at_most("tenant name", len(job.tenant.encode()), MAX_TENANT_BYTES, "bytes")
    _at_most("job input", len(job.input.encode()), MAX_INPUT_BYTES, "bytes")
    # Clients may leave defaults out and escape less than the payloads that are made of it here.
    _at_most("job input with its agent as JSON", len(to_json(job)), MAX_START_BYTES, "bytes")
    if not job.model:
        raise BadInputError(
            "the job names no model",
            hint="set `model` in the agent file or in the stack's settings",
        )


def _at_most(what: str, size: int, limit: int, unit: str) -> None:
    if size > limit:
        raise LimitExceededError(what, size, limit, unit, hint=f"shorten the {what}")


def spent_tokens(usage: Usage) -> int:
    """Return the tokens that count against `max_tokens`.

    Wasted tokens do not: a process killed half-way must not change how a job ends.
    """
    return usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens


def reached(limits: Limits, state: JobState, now: datetime) -> StopReason | None:
    """Return the limit that forbids a further turn, if one does."""
    if now >= state.deadline:
        return StopReason.MAX_WALL_TIME
    if state.turns >= limits.max_turns:
        return StopReason.MAX_TURNS
    if spent_tokens(state.usage) >= limits.max_tokens:
        return StopReason.MAX_TOKENS
    return None
