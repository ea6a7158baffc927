"""What the engine's time buys: seconds per prompt token and per step's decode, learned as it works.

Prefill: while any step in the engine has not had its first token, time runs; it is divided by the
prompt tokens that were computed in it. Steps that are computed together so share it, and decodes
that run beside them are part of the price. Older observations fade.
"""

from __future__ import annotations

FIRST_PREFILL_TOKEN_S = 0.000_2
FIRST_DECODE_S = 1.0
"""First guesses, replaced by what is seen."""

FADE = 0.98
"""What an observation weighs after the next one: the last 50 count."""


class RateModel:
    """Learns what prefill and decode cost on this engine with this load."""

    def __init__(self) -> None:
        self._prefilling = 0
        self._since = 0.0
        self._busy_s = FIRST_PREFILL_TOKEN_S
        self._tokens = 1.0
        self._decode_s = FIRST_DECODE_S
        self._decode_tokens = 32.0
        self._decodes = 1.0

    @property
    def prefill_token_s(self) -> float:
        """Seconds per uncomputed prompt token."""
        return self._busy_s / self._tokens

    @property
    def decode_s(self) -> float:
        """Seconds from a step's first token to its end."""
        return self._decode_s / self._decodes

    @property
    def output_tokens(self) -> float:
        """Tokens that a step generates."""
        return self._decode_tokens / self._decodes

    def prefill_s(self, num_tokens: int) -> float:
        """Return the expected time to compute so many prompt tokens."""
        return num_tokens * self.prefill_token_s

    def step_s(self, uncomputed_tokens: int) -> float:
        """Return the expected time of a step in the engine."""
        return self.prefill_s(uncomputed_tokens) + self.decode_s

    def prefill_began(self, now: float) -> None:
        """Note that a step has gone to the engine."""
        self._run(now)
        self._prefilling += 1

    def prefill_ended(self, num_tokens: int, now: float) -> None:
        """Note a step's first token, or its end without one (0 tokens)."""
        self._run(now)
        self._prefilling -= 1
        self._busy_s *= FADE
        self._tokens = self._tokens * FADE + num_tokens

    def decode_ended(self, duration_s: float, num_tokens: int) -> None:
        """Note a step's end, and how long after its first token that was."""
        self._decode_s = self._decode_s * FADE + duration_s
        self._decode_tokens = self._decode_tokens * FADE + num_tokens
        self._decodes = self._decodes * FADE + 1

    def lost(self) -> None:
        """Note that nothing is in the engine any more."""
        self._prefilling = 0

    def _run(self, now: float) -> None:
        if self._prefilling:
            self._busy_s += now - self._since
        self._since = now
