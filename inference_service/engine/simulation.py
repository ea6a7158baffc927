"""The simulated engine's arithmetic: continuous batching over a KV cache, without clock or loop.

Theory of operation. One engine step is `schedule` → time passes → `update`, as in vLLM V1:

1. Every running sequence has `token_ids` (prompt and sampled so far), of which `num_computed` have
   their KV. A step computes up to `max_num_batched_tokens` more over all sequences: one each for
   decoding ones, a chunk for those still in prefill. Running sequences go first, then waiting ones
   by (priority, arrival) while seats, tokens and blocks last; the first whose whole prompt does
   not fit, though only a chunk of it is computed now, stops the line.
2. Blocks are named by prefix when they are allocated, so that two sequences in the same step share
   them. At least the last token of a prompt is always computed.
3. When a running sequence finds no block, the sequence last in (priority, arrival) is preempted:
   it gives up its blocks and waits to be computed again.
4. A sequence whose tokens are all computed samples one token; its answer was fixed when it came.
5. What was stored and evicted is told to `cache`, if there is one, when a step has ended.
6. A step that only decodes may stand for many: nothing changes until the first sequence ends.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from contracts.llm_step import FinishReason
from inference_service.engine.block_pool import BlockPool
from inference_service.engine.cache_mirror import CacheMirror
from inference_service.engine.protocol import EngineOutput, EngineTiming


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds an engine step takes. The defaults resemble a small model on one GPU.

    A step costs `step_s`, plus its prefill tokens and decoding sequences, plus a part for all KV
    tokens that attention reads, and one for each pair of a prefill token and a token it attends to.
    """

    step_s: float = 0.006
    prefill_token_s: float = 0.000_05
    decode_seq_s: float = 0.000_1
    kv_token_s: float = 0.000_000_01
    prefill_pair_s: float = 0.0

    def duration_s(
        self,
        num_prefill_tokens: int,
        num_decoding: int,
        num_kv_tokens: int,
        num_prefill_pairs: float = 0.0,
    ) -> float:
        """Return the duration of one engine step, in seconds."""
        return (
            self.step_s
            + self.prefill_token_s * num_prefill_tokens
            + self.decode_seq_s * num_decoding
            + self.kv_token_s * num_kv_tokens
            + self.prefill_pair_s * num_prefill_pairs
        )


@dataclass(eq=False, slots=True)
class Generation:
    """One request in the engine. `answer` is what it will sample; times are in seconds."""

    token_ids: list[int]
    answer: Sequence[int]
    finish_reason: FinishReason
    priority: int
    arrival: int
    arrived_s: float
    stall_after: int | None = None
    num_computed: int = 0
    num_cached: int = 0
    num_sampled: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    blocks: list[int] = field(default_factory=list[int])
    keys: list[int] = field(default_factory=list[int])
    num_named: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Lower is served earlier and preempted later."""
        return (self.priority, self.arrival)

    @property
    def num_uncomputed(self) -> int:
        """Tokens without KV: 1 while decoding, more in prefill."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_stalled(self) -> bool:
        """Whether an injected fault keeps it from sampling any more."""
        return self.stall_after is not None and self.num_sampled >= self.stall_after


@dataclass(slots=True)
class EngineStep:
    """What one engine step computes: tokens per generation, `repeats` times if it only decodes."""

    num_tokens: dict[Generation, int]
    repeats: int
    duration_s: float


class Simulation:
    """Seats, queue and KV cache of one simulated engine."""

    def __init__(
        self,
        *,
        cost: CostModel,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        cache: CacheMirror | None = None,
    ) -> None:
        assert cache is None or cache.block_size == block_size
        self.pool = BlockPool(num_blocks)
        self.running: list[Generation] = []
        self.waiting: list[Generation] = []
        self.num_preemptions = 0
        self.cache = cache
        self._stored: list[tuple[list[int], int | None, list[int]]] = []
        self._cost = cost
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens

    def add(self, generation: Generation) -> None:
        """Put a new generation into the queue."""
        assert generation.answer
        assert generation.token_ids
        insort(self.waiting, generation, key=lambda g: g.order)

    def abort(self, generation: Generation) -> None:
        """Forget a generation; one that has finished already is no error."""
        if generation in self.running:
            self._leave(generation)
        elif generation in self.waiting:
            self.waiting.remove(generation)

    def schedule(self, now: float, *, max_repeats: int = 1) -> EngineStep | None:
        """Choose the next engine step; None if no generation can go on."""
        num_tokens: dict[Generation, int] = {}
        num_preemptions = self.num_preemptions
        budget = self._schedule_running(num_tokens, self._max_num_batched_tokens)
        if self.num_preemptions == num_preemptions:
            self._schedule_waiting(num_tokens, budget, now)
        if not num_tokens:
            return None
        repeats = self._repeats(num_tokens, max_repeats)
        return EngineStep(num_tokens, repeats, self._duration_s(num_tokens, repeats))

    def update(self, step: EngineStep, now: float) -> list[tuple[Generation, EngineOutput]]:
        """Apply a step that has ended at `now`; returns the pieces that it sampled."""
        outputs: list[tuple[Generation, EngineOutput]] = []
        for generation, num_tokens in step.num_tokens.items():
            if not generation.blocks:
                continue  # aborted while the step ran
            generation.num_computed += num_tokens
            if generation.num_uncomputed == 0 and not generation.is_stalled:
                outputs.append((generation, self._sample(generation, step.repeats, now)))
        self._tell_cache()
        return outputs

    def num_cached_tokens(self, token_ids: Sequence[int]) -> int:
        """Return how much of such a prompt would not be computed again, in tokens."""
        num_blocks = (len(token_ids) - 1) // self._block_size
        keys = _prefix_keys([], token_ids, num_blocks * self._block_size, self._block_size)
        return len(self.pool.find(keys)) * self._block_size

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, changing nothing, while any block is referenced."""
        if not self.pool.reset():
            return False
        self._stored.clear()
        if self.cache is not None:
            self.cache.cleared()
        return True

    def _schedule_running(self, num_tokens: dict[Generation, int], budget: int) -> int:
        for generation in sorted(self.running, key=lambda g: g.order):
            wanted = min(generation.num_uncomputed, budget)
            if wanted == 0 or generation.is_stalled or not generation.blocks:
                continue
            while not self._grow(generation, generation.num_computed + wanted):
                victim = max(self.running, key=lambda g: g.order)
                budget += num_tokens.pop(victim, 0)
                self._preempt(victim)
                if victim is generation:
                    return 0
            num_tokens[generation] = wanted
            budget -= wanted
        return budget

    def _schedule_waiting(self, num_tokens: dict[Generation, int], budget: int, now: float) -> None:
        while self.waiting and budget > 0 and len(self.running) < self._max_num_seqs:
            generation = self.waiting[0]
            cached = self.pool.find(self._prefix_keys(generation, len(generation.token_ids) - 1))
            num_cached = len(cached) * self._block_size
            if not self.pool.fits(cached, self._blocks(len(generation.token_ids)) - len(cached)):
                return
            wanted = min(len(generation.token_ids) - num_cached, budget)
            new = self.pool.take(cached, self._blocks(num_cached + wanted) - len(cached))
            assert new is not None
            del self.waiting[0]
            self.running.append(generation)
            generation.blocks = [*cached, *new]
            generation.num_named = len(cached)
            generation.num_computed = num_cached
            if generation.scheduled_s is None:
                generation.scheduled_s = now
                generation.num_cached = num_cached
            self._name_blocks(generation, num_cached + wanted)
            num_tokens[generation] = wanted
            budget -= wanted

    def _repeats(self, num_tokens: dict[Generation, int], max_repeats: int) -> int:
        if max_repeats == 1 or not all(g.num_sampled and g.num_uncomputed == 1 for g in num_tokens):
            return 1
        repeats = min(max_repeats, *(_num_until_event(g) for g in num_tokens))
        growth = sum(
            self._blocks(len(g.token_ids) + repeats - 1) - len(g.blocks) for g in num_tokens
        )
        return repeats if growth <= self.pool.num_free else 1

    def _duration_s(self, num_tokens: dict[Generation, int], repeats: int) -> float:
        decoding = sum(1 for g in num_tokens if g.num_uncomputed == 1)
        prefill = sum(num_tokens.values()) - decoding
        context = sum(g.num_computed + n for g, n in num_tokens.items())
        context += decoding * (repeats - 1) // 2
        pairs = sum(
            n * (g.num_computed + n / 2) for g, n in num_tokens.items() if g.num_uncomputed > 1
        )
        return repeats * self._cost.duration_s(prefill, decoding, context, pairs)

    def _sample(self, generation: Generation, repeats: int, now: float) -> EngineOutput:
        start = generation.num_sampled
        end = min(start + repeats, len(generation.answer))
        sampled = list(generation.answer[start:end])
        generation.num_sampled = end
        generation.token_ids.extend(sampled)
        generation.num_computed += len(sampled) - 1
        if generation.first_token_s is None:
            generation.first_token_s = now
        done = end == len(generation.answer)
        if done or repeats > 1:
            grown = self._grow(generation, generation.num_computed)
            assert grown, "repeats were chosen so that the blocks are there"
        if not done:
            return EngineOutput(sampled, generation.num_cached)
        self._leave(generation)
        return EngineOutput(
            sampled, generation.num_cached, generation.finish_reason, _timing(generation, now)
        )

    def _grow(self, generation: Generation, num_tokens: int) -> bool:
        """Give a generation the blocks for `num_tokens`; False, changing nothing, if short."""
        num_new = self._blocks(num_tokens) - len(generation.blocks)
        if num_new > 0:
            new = self.pool.take((), num_new)
            if new is None:
                return False
            generation.blocks += new
        self._name_blocks(generation, num_tokens)
        return True

    def _leave(self, generation: Generation) -> None:
        self.running.remove(generation)
        self.pool.release(generation.blocks)
        generation.blocks = []

    def _preempt(self, generation: Generation) -> None:
        self._leave(generation)
        generation.num_computed = generation.num_named = 0
        self.num_preemptions += 1
        self.add(generation)

    def _name_blocks(self, generation: Generation, num_tokens: int) -> None:
        if num_tokens // self._block_size <= generation.num_named:
            return
        keys = self._prefix_keys(generation, num_tokens)
        start = generation.num_named
        for index in range(start, len(keys)):
            self.pool.name(generation.blocks[index], keys[index])
        generation.num_named = len(keys)
        if self.cache is not None:
            token_ids = generation.token_ids[
                start * self._block_size : len(keys) * self._block_size
            ]
            self._stored.append((keys[start:], keys[start - 1] if start else None, token_ids))

    def _tell_cache(self) -> None:
        """Feed the mirror. A block stored and evicted in one step is so counted up, then down."""
        if self.cache is not None:
            for event in self._stored:
                self.cache.stored(*event)
            self.cache.removed(self.pool.forgotten)
        self._stored.clear()
        self.pool.forgotten.clear()

    def _prefix_keys(self, generation: Generation, num_tokens: int) -> list[int]:
        """Return the keys of the whole blocks within the first `num_tokens` tokens."""
        return _prefix_keys(generation.keys, generation.token_ids, num_tokens, self._block_size)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _prefix_keys(
    keys: list[int], token_ids: Sequence[int], num_tokens: int, size: int
) -> list[int]:
    """Return the keys of the whole blocks within the first `num_tokens`; `keys` grows with them."""
    for start in range(len(keys) * size, num_tokens - size + 1, size):
        before = keys[-1] if keys else 0
        keys.append(hash((before, tuple(token_ids[start : start + size]))))
    return keys[: num_tokens // size]


def _num_until_event(generation: Generation) -> int:
    """Return the tokens a generation will sample before it finishes or stalls."""
    end = len(generation.answer)
    if generation.stall_after is not None:
        end = min(end, generation.stall_after)
    return max(1, end - generation.num_sampled)


def _timing(generation: Generation, now: float) -> EngineTiming:
    assert generation.scheduled_s is not None
    assert generation.first_token_s is not None
    return EngineTiming(
        queue_s=generation.scheduled_s - generation.arrived_s,
        prefill_s=generation.first_token_s - generation.scheduled_s,
        decode_s=now - generation.first_token_s,
    )
