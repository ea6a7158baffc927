"""What the scheduler is told: facts about steps and the engine, in the past tense."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepReady:
    """All inputs of a step exist. `session` is the growing conversation it belongs to.

    `prompt_tokens` + `max_tokens` is what it may occupy in the KV cache; `uncomputed_tokens` is the
    part of the prompt believed not to be cached. `is_new` marks the first step of a session.
    """

    step_id: str
    session: str
    prompt_tokens: int
    uncomputed_tokens: int
    max_tokens: int
    is_new: bool
    priority: int = 3

    def __post_init__(self) -> None:
        assert 0 < self.uncomputed_tokens <= self.prompt_tokens, self
        assert self.max_tokens > 0, self


@dataclass(frozen=True, slots=True)
class StepCancelled:
    """Nobody waits for this step any more."""

    step_id: str


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The engine has computed the step's whole prompt and sampled its first token."""

    step_id: str


@dataclass(frozen=True, slots=True)
class StepFinished:
    """The engine has ended a dispatched step and its seat is free."""

    step_id: str


@dataclass(frozen=True, slots=True)
class StepFailed:
    """A dispatched step left the engine without a result (failure or abort); its seat is free."""

    step_id: str


@dataclass(frozen=True, slots=True)
class CapacityChanged:
    """The engine's capacity is now this. Counts of requests, tokens, tokens, tokens."""

    max_num_seqs: int
    kv_tokens: int
    max_model_len: int
    prefill_tokens: int
    """Uncomputed prompt tokens that may stand in the engine's own queue."""


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The engine is gone, and with it everything that was dispatched to it."""


Event = (
    StepReady
    | StepCancelled
    | FirstToken
    | StepFinished
    | StepFailed
    | CapacityChanged
    | EngineLost
)
