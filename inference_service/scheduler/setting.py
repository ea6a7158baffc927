"""The scheduler's few constants. None of them describes a workload: those it learns by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Bounds and switches of the ready-cohort scheduler.

    `watermark`: share of the KV cache that planned work may fill; the rest is for what is not
    planned (an output longer than usual, the block of a refresh).
    `max_overtaken_s`: how long a waiting step may be overtaken by sessions that arrived later,
    before it holds a reservation.
    `max_queued_kv`: prompts of waiting new sessions, as a multiple of the KV cache; new sessions
    are refused beyond that.
    `max_waiting`: steps of new sessions that wait here rather than in Temporal.
    `max_sessions`: waiting sessions remembered; the one heard of least recently is forgotten.
    `lookahead`: waiting steps that are looked at for one that fits.
    `tenant_weights`: shares of tenants that are not 1.
    `reserve`, `refresh`, `yielding`, `prewarm`: switches for measuring what each is good for.
    """

    watermark: float = 0.98
    max_overtaken_s: float = 120.0
    max_queued_kv: float = 8.0
    max_waiting: int = 64
    max_sessions: int = 100_000
    lookahead: int = 16
    tenant_weights: Mapping[str, float] = field(default_factory=dict[str, float])
    reserve: bool = True
    refresh: bool = True
    yielding: bool = True
    prewarm: bool = True

    def __post_init__(self) -> None:
        assert 0 < self.watermark <= 1
        assert min(self.max_overtaken_s, self.max_queued_kv) > 0
        assert min(self.max_waiting, self.max_sessions, self.lookahead) > 0
        assert all(weight > 0 for weight in self.tenant_weights.values())
