"""What a ledger says of attempts: their outcomes, and the answers to a claim."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from contracts.error import BadInputError
from contracts.llm_step import LLMStepResult, Usage

MAX_ERROR_CHARS = 4_000
"""Error text kept in a ledger row."""


class StepInputChangedError(BadInputError):
    """A step id was used again with another input; no retry can mend that."""


class AttemptOutcome(StrEnum):
    """What became of one attempt."""

    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"
    """A typed failure of the step itself; these are counted."""
    ABANDONED = "abandoned"
    """Superseded by a later attempt, or killed with its process."""
    HANDED_BACK = "handed_back"
    """Given up by a service that drains."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """The step is the caller's to generate, under `epoch`.

    `failures` counts earlier typed failures. `past` sums the tokens of all earlier attempts; what
    they generated is in its `completion_tokens` and, since none of it was kept, in `wasted_tokens`.
    """

    epoch: int
    failures: int
    past: Usage


@dataclass(frozen=True, slots=True)
class AlreadyFinished:
    """The step has its result; nothing may be generated."""

    result: LLMStepResult


@dataclass(frozen=True, slots=True)
class Orphan:
    """A RUNNING attempt of a replica; `task_token` is that of the last attempt attached to it."""

    step_id: str
    epoch: int
    task_token: bytes


@dataclass(frozen=True, slots=True)
class Attempt:
    """One row of the ledger; `usage` is of this attempt alone."""

    step_id: str
    epoch: int
    outcome: AttemptOutcome
    replica: str
    usage: Usage
    error: str
    claimed_at: datetime
    ended_at: datetime | None
