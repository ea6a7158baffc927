"""The world's engine: the simulated engine's arithmetic, and who loses what it evicts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from bench.cost import CPU_SMALL
from inference_service.engine.block_pool import BlockPool
from inference_service.engine.simulation import CostModel, EngineStep, Generation, Simulation
from inference_service.scheduler.event import CapacityChanged

MAX_REPEATS = 1_000_000


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Size and cost of the engine. Its cache stays the same; pressure comes from sessions."""

    num_blocks: int = 400
    block_size: int = 32
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int = 8_192
    cost: CostModel = field(default=CPU_SMALL)

    @property
    def capacity(self) -> CapacityChanged:
        """What the scheduler is told, as the inference service tells it."""
        return CapacityChanged(
            max_num_seqs=self.max_num_seqs,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            prefill_tokens=2 * self.max_num_batched_tokens,
        )

    def simulation(self) -> Simulation:
        """Return a fresh simulated engine of this kind."""
        return Simulation(
            cost=self.cost,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

    def repeats_until(self, simulation: Simulation, span_s: float) -> int:
        """Return how many engine steps, if all only decode, reach over that span."""
        if span_s == math.inf:
            return MAX_REPEATS
        running = simulation.running
        context = sum(len(generation.token_ids) for generation in running)
        step_s = self.cost.duration_s(0, len(running), context)
        return max(1, min(MAX_REPEATS, math.ceil(span_s / step_s)))


class WatchedPool(BlockPool):
    """A block pool that notes which watched keys it evicts."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.lost: list[int] = []
        self._watched: dict[int, int] = {}

    def watch(self, key: int) -> None:
        """Note the eviction of this key from now on; as often unwatched as watched."""
        self._watched[key] = self._watched.get(key, 0) + 1

    def unwatch(self, key: int) -> None:
        """Note it no more."""
        count = self._watched.pop(key)
        if count > 1:
            self._watched[key] = count - 1

    def _take_oldest(self) -> int:
        key = self._key_of[next(iter(self._free))]
        if key is not None and key in self._watched:
            self.lost.append(key)
        return super()._take_oldest()


class WorldEngine:
    """One engine in virtual time: at most one engine step is under way, until `ends_s`."""

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self.simulation = model.simulation()
        self.pool = WatchedPool(model.num_blocks)
        self.simulation.pool = self.pool
        self.ends_s = math.inf
        self._step: EngineStep | None = None

    @property
    def is_busy(self) -> bool:
        """Whether an engine step is under way."""
        return self._step is not None

    def start(self, now: float, until_s: float) -> None:
        """Begin the next engine step, if none is under way and there is anything to compute.

        A step that only decodes is stretched to the first boundary at or after `until_s`.
        """
        simulation = self.simulation
        if self._step is not None or not (simulation.running or simulation.waiting):
            return
        repeats = self.model.repeats_until(simulation, until_s - now)
        self._step = simulation.schedule(now, max_repeats=repeats)
        if self._step is not None:
            self.ends_s = now + self._step.duration_s

    def end(self) -> list[Generation]:
        """End the engine step; returns the generations that have sampled."""
        assert self._step is not None
        outputs = self.simulation.update(self._step, self.ends_s)
        self._step, self.ends_s = None, math.inf
        return [generation for generation, _ in outputs]

    def num_cached(self, keys: Iterable[int]) -> int:
        """Return the tokens of the longest cached prefix of these blocks."""
        return len(self.pool.find(keys)) * self.model.block_size
