"""What the engine's time buys, learned as it works: prefill, decode, and how decodes share it.

Prefill: while any step in the engine has not had its first token, time runs; it is divided by the
prompt tokens that were computed in it. Steps that are computed together so share it, and decodes
that run beside them are part of the price.

Decode: an engine step that only decodes takes a + c x n seconds for n steps: a is paid once for
all. Each finished step is a point of that line: the seconds per token while nothing was
prefilling, and how many decoded beside it. The line is fitted by least squares.

Older observations fade.
"""

from __future__ import annotations

FIRST_PREFILL_TOKEN_S = 0.000_2
FIRST_OUTPUT_TOKENS = 32.0
FIRST_DECODE_S = 1.0
"""First guesses, replaced by what is seen."""

SHORTEST_S = 1e-6
"""A decode that had less time to itself tells nothing: that may be what rounding has left."""

FADE = 0.98
"""What an observation weighs after the next one: the last 50 count."""


class _Line:
    """y = intercept + slope x over faded points, both at least 0."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        self._n = self._n * FADE + 1
        self._x = self._x * FADE + x
        self._y = self._y * FADE + y
        self._xx = self._xx * FADE + x * x
        self._xy = self._xy * FADE + x * y

    def fit(self) -> tuple[float, float]:
        """Return (intercept, slope); a line through few or equal points is level."""
        if not self._n:
            return 0.0, 0.0
        mean_x, mean_y = self._x / self._n, self._y / self._n
        variance = self._xx / self._n - mean_x * mean_x
        if self._n < 3 or variance <= 0.05 * mean_x * mean_x:
            return mean_y, 0.0
        slope = (self._xy / self._n - mean_x * mean_y) / variance
        slope = min(max(slope, 0.0), mean_y / mean_x)
        return mean_y - slope * mean_x, slope


class RateModel:
    """Learns what prefill and decode cost on this engine with this load."""

    def __init__(self) -> None:
        self._now = 0.0
        self._prefilling = 0
        self._decoding = 0
        self._prefill_s = 0.0
        self._decode_area = 0.0
        self._busy_s = FIRST_PREFILL_TOKEN_S
        self._tokens = 1.0
        self._decode_s = FIRST_DECODE_S
        self._decode_tokens = FIRST_OUTPUT_TOKENS
        self._decodes = 1.0
        self._line = _Line()
        self._began: dict[str, tuple[float, float, float]] = {}

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

    @property
    def decode_base_s(self) -> float:
        """Seconds of an engine step that decodes, shared by all that decode in it."""
        return self._line.fit()[0]

    @property
    def decode_each_s(self) -> float:
        """Seconds that each step adds to an engine step that decodes."""
        return self._line.fit()[1]

    def prefill_s(self, num_tokens: int) -> float:
        """Return the expected time to compute so many prompt tokens."""
        return num_tokens * self.prefill_token_s

    def step_s(self, uncomputed_tokens: int) -> float:
        """Return the expected time of a step in the engine."""
        return self.prefill_s(uncomputed_tokens) + self.decode_s

    def entered(self, now: float) -> None:
        """Note that a step has gone to the engine."""
        self._advance(now)
        self._prefilling += 1

    def first_token(self, step_id: str, num_tokens: int, now: float) -> None:
        """Note a step's first token, for which `num_tokens` of its prompt were computed."""
        self._advance(now)
        self._prefilling -= 1
        self._decoding += 1
        self._busy_s *= FADE
        self._tokens = self._tokens * FADE + num_tokens
        self._began[step_id] = (now, self._prefill_s, self._decode_area)

    def left(self, step_id: str, num_tokens: int, now: float) -> None:
        """Note that a step has left the engine with so many tokens generated, 0: it has failed."""
        self._advance(now)
        if step_id not in self._began:
            self._prefilling -= 1
            return
        self._decoding -= 1
        began_s, prefill_s, area = self._began.pop(step_id)
        if num_tokens < 2:
            return
        self._decode_s = self._decode_s * FADE + now - began_s
        self._decode_tokens = self._decode_tokens * FADE + num_tokens
        self._decodes = self._decodes * FADE + 1
        alone_s = now - began_s - (self._prefill_s - prefill_s)
        if alone_s > SHORTEST_S:
            self._line.add((self._decode_area - area) / alone_s, alone_s / (num_tokens - 1))

    def lost(self) -> None:
        """Note that nothing is in the engine any more."""
        self._prefilling = self._decoding = 0
        self._began.clear()

    def _advance(self, now: float) -> None:
        elapsed_s = now - self._now
        if self._prefilling:
            self._busy_s += elapsed_s
            self._prefill_s += elapsed_s
        else:
            self._decode_area += elapsed_s * self._decoding
        self._now = now
