"""Limits: which of the agent's is reached, and what is too large for a job to take."""

from __future__ import annotations

from datetime import timedelta

from pydantic_core import to_json

from contracts.agent import Limits
from contracts.error import BadInputError, LimitExceededError
from contracts.job import AgentJobInput, JobMessage, StopReason
from contracts.limit import (
    MAX_AGENT_BYTES,
    MAX_INBOX_BYTES,
    MAX_INPUT_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_START_BYTES,
)
from contracts.llm_step import Usage
from workflows.state import JobState

MAX_TENANT_BYTES = 64
"""A tenant is Temporal's fairness key, which may not be longer."""

RESERVED_SHARE = 0.1
MAX_RESERVED_TIME = timedelta(seconds=30)
"""Of a job's wall time, this share and no more than this is kept back for its last answer."""

LEAST_TIME = timedelta(milliseconds=1)
"""A limit on time is never 0."""

MAX_JOB_ID_CHARS = 180
"""A step id is the job id, a branch and a counter, together at most 200 characters."""


def check_input(job_id: str, job: AgentJobInput) -> None:
    """Refuse what Temporal would refuse later, again and again.

    Raises `LimitExceededError` or `BadInputError`.
    """
    _at_most("job id", len(job_id), MAX_JOB_ID_CHARS, "characters")
    _at_most("tenant name", len(job.tenant.encode()), MAX_TENANT_BYTES, "bytes")
    _at_most("job input", len(job.input.encode()), MAX_INPUT_BYTES, "bytes")
    _at_most("agent, as JSON,", len(to_json(job.agent)), MAX_AGENT_BYTES, "bytes")
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


def reached(limits: Limits, state: JobState) -> StopReason | None:
    """Return the limit, wall time aside, that forbids a further turn, if one does."""
    if state.turns >= limits.max_turns:
        return StopReason.MAX_TURNS
    if spent_tokens(state.usage) >= limits.max_tokens:
        return StopReason.MAX_TOKENS
    if limits.max_llm_steps is not None and state.llm_steps >= limits.max_llm_steps:
        return StopReason.MAX_LLM_STEPS
    engine_time = limits.max_engine_time
    if engine_time is not None and state.attained_s >= engine_time.total_seconds():
        return StopReason.MAX_ENGINE_TIME
    return None


def reserved_time(limits: Limits) -> timedelta:
    """Return the wall time that is kept back for the last answer."""
    if limits.last_answer_tokens == 0:
        return timedelta(0)
    return min(MAX_RESERVED_TIME, limits.max_wall_time * RESERVED_SHARE)


def narrowed(
    own: Limits, of_caller: Limits, state: JobState, *, callers: int, time_left: timedelta
) -> Limits:
    """Return a sub-agent's limits within what is left of its caller's.

    What is left is shared evenly by the `callers`, the sub-agents that are called together.
    """

    def share(limit: int | None, used: int, most: int | None, least: int) -> int | None:
        if limit is None:
            return most
        left = max(least, (limit - used) // callers)
        return left if most is None else min(most, left)

    spent = spent_tokens(state.usage)
    engine_time, left = own.max_engine_time, of_caller.max_engine_time
    if left is not None:
        left = max(LEAST_TIME, (left - timedelta(seconds=state.attained_s)) / callers)
        engine_time = left if engine_time is None else min(engine_time, left)
    return own.model_copy(
        update={
            "max_tokens": share(of_caller.max_tokens, spent, own.max_tokens, 1),
            "max_llm_steps": share(of_caller.max_llm_steps, state.llm_steps, own.max_llm_steps, 1),
            "max_tool_calls": share(
                of_caller.max_tool_calls, state.tool_calls, own.max_tool_calls, 0
            ),
            "max_engine_time": engine_time,
            "max_wall_time": min(own.max_wall_time, time_left),
        }
    )


def check_message(message: JobMessage, state: JobState) -> None:
    """Refuse a message that a job cannot take; raises `BadInputError` or `LimitExceededError`."""
    if message.id in state.seen_messages:
        return
    if not message.text.strip():
        raise BadInputError("the message is empty", hint="send what the job shall read")
    size = len(to_json(message.text))
    _at_most("message", size, MAX_MESSAGE_BYTES, "bytes")
    waiting = sum(len(to_json(each.text)) for each in state.inbox)
    if waiting + size > MAX_INBOX_BYTES:
        raise LimitExceededError(
            "the job's inbox, with this message,", waiting + size, MAX_INBOX_BYTES, "bytes",
            hint="send it again when the job has begun its next turn",
        )  # fmt: skip
