"""What the scheduler is told: facts about steps, sessions and the engine, in the past tense.

All times are seconds of the shell's monotonic clock, all sizes tokens, unless a name says blocks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """A stretch of a context, up to token `end`. Equal ids mean equal tokens in an equal place."""

    id: str
    end: int


@dataclass(frozen=True, slots=True)
class FanOut:
    """A group of LLM steps that their job will join on, and how many belong to it."""

    group: str
    size: int


@dataclass(frozen=True, slots=True)
class StepReady:
    """All inputs of a step exist.

    `session` is the growing leaf of one job's context tree that the step continues; `path` is its
    prompt, root first, so that what sessions share has the same nodes. `cached_tokens` is the part
    of the prompt that the engine's KV events say is cached, None where the engine does not tell.
    `is_new` marks the first step of a session that this service has not seen. `attained_s` is the
    engine time that the job's earlier steps used. A speculative step is shed after `expires_s`.
    """

    step_id: str
    session: str
    path: tuple[Node, ...]
    max_tokens: int
    is_new: bool
    cached_tokens: int | None = None
    job: str = ""
    tenant: str = "default"
    priority: int = 3
    attained_s: float = 0.0
    deadline_s: float | None = None
    fan_out: FanOut | None = None
    is_speculative: bool = False
    expires_s: float | None = None

    def __post_init__(self) -> None:
        assert self.path, self
        assert 0 <= (self.cached_tokens or 0) <= self.prompt_tokens, self
        assert self.max_tokens > 0, self

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self.path[-1].end


@dataclass(frozen=True, slots=True)
class StepCancelled:
    """Nobody waits for this step any more."""

    step_id: str


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The engine has computed the step's whole prompt and sampled its first token.

    `cached_tokens` of the prompt came from its prefix cache; None where it tells that only later.
    """

    step_id: str
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class StepFinished:
    """The engine has ended a dispatched step and its seat is free.

    `leaf` is the last node of the step's path, grown by what was generated. The session is idle
    until `ToolsStarted`, `SessionEnded` or its next `StepReady` says otherwise. `cached_tokens` of
    the prompt came from the prefix cache, if `FirstToken` could not say.
    """

    step_id: str
    leaf: Node
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class StepFailed:
    """A dispatched step left the engine without a result (failure or abort); its seat is free."""

    step_id: str


@dataclass(frozen=True, slots=True)
class ToolsStarted:
    """The session's job has gone to call these tools; it comes back when the last has ended."""

    session: str
    tools: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SessionIdle:
    """The session waits for a person or a timer: nobody knows for how long."""

    session: str


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The session will never continue; its KV is dead. One that is not known is no error."""

    session: str


@dataclass(frozen=True, slots=True)
class TouchDone:
    """A `Refresh` or `Prewarm` has left the engine; `cached_tokens` were cached, -1: it failed."""

    session: str
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class KVEvicted:
    """The engine has evicted a part of a waiting session; `cached_tokens` of it are left.

    One that is not known is no error.
    """

    session: str
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class GroupResolved:
    """The job needs no more of this fan-out group; what still waits of it is stale."""

    group: str


@dataclass(frozen=True, slots=True)
class CapacityChanged:
    """The engine's capacity is now this."""

    max_num_seqs: int
    num_blocks: int
    block_size: int
    max_model_len: int
    prefill_tokens: int
    """Uncomputed prompt tokens that may stand in the engine's own queue."""


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The engine is gone, with everything that was dispatched to it and everything cached."""


Event = (
    StepReady
    | StepCancelled
    | FirstToken
    | StepFinished
    | StepFailed
    | ToolsStarted
    | SessionIdle
    | SessionEnded
    | TouchDone
    | KVEvicted
    | GroupResolved
    | CapacityChanged
    | EngineLost
)
