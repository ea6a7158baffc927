"""What a run of agents is judged by."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Metrics:
    """One run. Sessions with a tool that never returns are left out of makespan and JCT.

    JCT counts from a session's arrival. `prefix_hit` is cached over prompt tokens of all finished
    steps; `attainable_hit` what a cache without limit would give, in whole blocks;
    `recompute_share` the part of the computed prompt tokens that such a cache would have held.
    `idle_with_ready_share` of the makespan the engine had nothing to do while a step was ready.
    `overhead_tokens` were computed for refreshes and prewarms. `max_wait_s`: from ready to a seat
    of the engine. `stalled`: nothing would have happened any more, and sessions were open.
    """

    makespan_s: float
    jct_mean_s: float
    jct_p50_s: float
    jct_p95_s: float
    prefix_hit: float
    attainable_hit: float
    preemptions: int
    recompute_share: float
    idle_with_ready_share: float
    idle_share: float
    overhead_tokens: int
    touches: int
    mean_cohort: float
    max_wait_s: float
    sessions: int
    steps: int
    rejected: int
    shed: int
    stalled: bool
    digest: str

    def as_dict(self) -> dict[str, Any]:
        """Return the figures by name."""
        return asdict(self)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which that share of the values lies, interpolated."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    if ordered[low] == ordered[high]:
        return ordered[low]
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean, NaN of nothing."""
    return sum(values) / len(values) if values else math.nan


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean, NaN of nothing."""
    if not values:
        return math.nan
    return math.exp(sum(math.log(value) for value in values) / len(values))


@dataclass(slots=True)
class Tally:
    """What a run counts as it goes; `metrics` sums it up."""

    jct_s: list[float] = field(default_factory=list[float])
    last_end_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    attainable_tokens: int = 0
    recomputed_tokens: int = 0
    idle_s: float = 0.0
    idle_with_ready_s: float = 0.0
    overhead_tokens: int = 0
    touches: int = 0
    cohorts: int = 0
    dispatched: int = 0
    max_wait_s: float = 0.0
    steps: int = 0
    rejected: int = 0
    shed: int = 0
    _digest: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=8))

    def decided(self, now: float, decision: object) -> None:
        """Note a decision for the digest."""
        self._digest.update(f"{now!r} {decision!r}\n".encode())

    def idle(self, span_s: float, *, is_ready: bool) -> None:
        """Note a time in which the engine did nothing."""
        self.idle_s += span_s
        if is_ready:
            self.idle_with_ready_s += span_s

    def finished(self, *, prompt: int, cached: int, attainable: int, wait_s: float) -> None:
        """Note a step that has come to its end."""
        self.steps += 1
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.attainable_tokens += attainable
        self.recomputed_tokens += max(0, attainable - cached)
        self.max_wait_s = max(self.max_wait_s, wait_s)

    def metrics(self, *, preemptions: int, stalled: bool) -> Metrics:
        """Return the figures of the run."""
        makespan_s = math.inf if stalled else self.last_end_s
        jct_s = [math.inf] if stalled else self.jct_s
        wall_s = self.last_end_s or math.inf
        return Metrics(
            makespan_s=makespan_s,
            jct_mean_s=mean(jct_s),
            jct_p50_s=percentile(jct_s, 0.5),
            jct_p95_s=percentile(jct_s, 0.95),
            prefix_hit=self.cached_tokens / max(1, self.prompt_tokens),
            attainable_hit=self.attainable_tokens / max(1, self.prompt_tokens),
            preemptions=preemptions,
            recompute_share=self.recomputed_tokens
            / max(1, self.prompt_tokens - self.cached_tokens),
            idle_with_ready_share=self.idle_with_ready_s / wall_s,
            idle_share=self.idle_s / wall_s,
            overhead_tokens=self.overhead_tokens,
            touches=self.touches,
            mean_cohort=self.dispatched / max(1, self.cohorts),
            max_wait_s=self.max_wait_s,
            sessions=len(self.jct_s),
            steps=self.steps,
            rejected=self.rejected,
            shed=self.shed,
            stalled=stalled,
            digest=self._digest.hexdigest(),
        )
