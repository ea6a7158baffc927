"""What a session will do: its LLM steps, the tools between them, and their lengths in tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

NEVER_S = math.inf
PERSON = "person"
"""The `tool` that is none: the session waits for a person, and its scheduler is told so."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One LLM step: `new_tokens` join the context, `output_tokens` are generated.

    The context before it is kept up to `keep_tokens`, all of it if None. The first step's new
    tokens hold the shared opening. `tool` is called afterwards and takes `gap_s` (`NEVER_S`: it
    never returns); the last step calls none. The step asks for room for `max_tokens`, or for what
    its answer takes if that is more.
    """

    new_tokens: int
    output_tokens: int
    tool: str = ""
    gap_s: float = 0.0
    keep_tokens: int | None = None
    max_tokens: int = 64

    def __post_init__(self) -> None:
        assert self.new_tokens > 0, self
        assert self.output_tokens > 0, self
        assert self.gap_s >= 0, self

    @property
    def room(self) -> int:
        """Tokens of answer that the step asks room for."""
        return max(self.max_tokens, self.output_tokens)


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """One session: when it arrives and its steps. Equal `opening`s mean an equal opening."""

    name: str
    steps: tuple[StepPlan, ...]
    arrival_s: float = 0.0
    opening: str = "system"
    shared_tokens: int = 0

    def __post_init__(self) -> None:
        assert self.steps, self
        assert 0 <= self.shared_tokens <= self.steps[0].new_tokens, self

    @property
    def never_ends(self) -> bool:
        """Whether one of its tools never returns."""
        return any(step.gap_s == NEVER_S for step in self.steps)

    @property
    def final_tokens(self) -> int:
        """Length of the whole context at the end."""
        tokens = 0
        for step in self.steps:
            kept = tokens if step.keep_tokens is None else min(tokens, step.keep_tokens)
            tokens = kept + step.new_tokens + step.output_tokens
        return tokens

    def unique_blocks(self, block_size: int) -> int:
        """Return the whole blocks of the final context that no other session has."""
        return -(-self.final_tokens // block_size) - self.shared_tokens // block_size
