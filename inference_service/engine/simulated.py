"""An engine without a model: real batching, caching and timing behaviour, made-up answers."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Literal

from contracts.llm_step import FinishReason
from inference_service.engine.byte_tokenizer import ByteTokenizer
from inference_service.engine.cache_mirror import CacheMirror
from inference_service.engine.protocol import (
    Capability,
    ChatTokenizer,
    EngineCapacity,
    EngineDeadError,
    EngineOutput,
    EngineRequest,
    EngineStats,
    EngineStepStats,
    EngineTiming,
    answer_room,
    ignore_step,
)
from inference_service.engine.schema_instance import WORDS, make_instance
from inference_service.engine.simulation import CostModel, EngineStep, Generation, Simulation

Respond = Callable[[EngineRequest, str], str]
"""Answers a request, given the decoded text of its prompt. Must be deterministic."""

MAX_REPEATS = 1_000_000
"""Decode steps taken at once when time is not simulated."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with the `request`-th request (from 0) once it has `after_tokens` tokens.

    A stall keeps that request silent, holding its seat, until it is aborted; the others go on. A
    death loses the whole engine.
    """

    kind: Literal["stall", "die"]
    request: int = 0
    after_tokens: int = 1


@dataclass(frozen=True, slots=True)
class SimulatedConfig:
    """Size, cost and faults of a simulated engine.

    `time_scale` is wall seconds per simulated second; at 0 nothing is waited for, and timings
    are 0. `seed` decides the default answers.
    """

    max_num_seqs: int = 32
    num_blocks: int = 4_096
    block_size: int = 32
    max_model_len: int = 32_768
    max_num_batched_tokens: int = 2_048
    cost: CostModel = field(default_factory=CostModel)
    time_scale: float = 1.0
    seed: int = 0
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        assert min(self.max_num_seqs, self.block_size, self.max_num_batched_tokens) > 0
        assert self.time_scale >= 0
        assert self.max_model_len <= self.num_blocks * self.block_size, "one sequence must fit"


@dataclass(eq=False, slots=True)
class _Stream:
    """What a consumer waits on: pieces, or None for the engine's death."""

    pieces: asyncio.Queue[EngineOutput | None] = field(
        default_factory=asyncio.Queue[EngineOutput | None]
    )
    dies_after: int | None = None
    num_tokens: int = 0


class SimulatedEngine:
    """Runs a `Simulation` in scaled time and streams its pieces.

    Same requests in the same order, same answers, whatever `PYTHONHASHSEED` or the time scale.
    """

    capabilities = frozenset(Capability)

    def __init__(
        self,
        config: SimulatedConfig | None = None,
        respond: Respond | None = None,
        tokenizer: ChatTokenizer | None = None,
    ) -> None:
        self.config = config or SimulatedConfig()
        self._respond = respond or self._make_answer
        self._tokenizer = tokenizer or ByteTokenizer()
        self.on_step: Callable[[EngineStepStats], object] = ignore_step
        self._death: str | None = "is not started"
        self._runner: asyncio.Task[None] | None = None

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The one it was given, or the byte tokenizer."""
        return self._tokenizer

    @property
    def cache(self) -> CacheMirror:
        """What the simulated cache holds, as of the last engine step."""
        cache = self._simulation.cache
        assert cache is not None
        return cache

    async def start(self) -> EngineCapacity:
        """Start with an empty cache; also after a death or a close."""
        await self.close()
        config = self.config
        self._simulation = Simulation(
            cost=config.cost,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            cache=CacheMirror(config.block_size),
        )
        self._streams: dict[Generation, _Stream] = {}
        self._num_requests = 0
        self._now_s = 0.0
        self._wake = asyncio.Event()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._death = None
        self._runner = asyncio.create_task(self._run(), name="simulated-engine")
        return EngineCapacity(
            max_num_seqs=config.max_num_seqs,
            kv_tokens=config.num_blocks * config.block_size,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Generate the answer of `respond`, in as many pieces as it takes engine steps."""
        await self.check_health()
        generation, stream = self._enter(request)
        try:
            while True:
                piece = await stream.pieces.get()
                if piece is None:
                    raise self._dead()
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            self._streams.pop(generation, None)
            self._simulation.abort(generation)

    def blocks(self, num_tokens: int) -> int:
        """Return the KV blocks of a sequence of that many tokens."""
        return -(-num_tokens // self.config.block_size)

    async def stats(self) -> EngineStats:
        """Return the current load."""
        await self.check_health()
        return EngineStats(
            num_running=len(self._simulation.running),
            num_waiting=len(self._simulation.waiting),
            kv_cache_usage=self._simulation.pool.usage,
            num_preemptions=self._simulation.num_preemptions,
        )

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine is not started, closed or dead."""
        if self._death is not None:
            raise self._dead()

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False if requests are running."""
        await self.check_health()
        return self._simulation.reset_prefix_cache()

    async def close(self) -> None:
        """Stop; requests in flight end with EngineDeadError."""
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        runner.cancel()
        await asyncio.gather(runner, return_exceptions=True)
        if self._death is None:
            self._end("is closed")

    def check_integrity(self) -> None:
        """Assert that the simulated cache is consistent."""
        self._simulation.pool.check_integrity()

    def stall(self) -> None:
        """Make no progress from now on, while looking healthy, until `resume`."""
        self._resumed.clear()

    def resume(self) -> None:
        """End a stall."""
        self._resumed.set()

    def die(self) -> None:
        """Lose every request, as if the engine's process were killed."""
        if self._runner is not None:
            self._runner.cancel()
        self._end("died")

    def _end(self, death: str) -> None:
        self._death = death
        for stream in self._streams.values():
            stream.pieces.put_nowait(None)
        self._streams.clear()

    def _dead(self) -> EngineDeadError:
        return EngineDeadError(f"the simulated engine {self._death}", hint="start the engine again")

    def _enter(self, request: EngineRequest) -> tuple[Generation, _Stream]:
        room = answer_room(request, self.config.max_model_len)
        prompt = list(request.prompt_token_ids)
        answer = self._tokenizer.encode(
            self._respond(request, self._tokenizer.decode(prompt)), split_special=True
        )
        answer.append(self._tokenizer.eos_token_id)
        faults = [f for f in self.config.faults if f.request == self._num_requests]
        generation = Generation(
            token_ids=prompt,
            answer=answer[:room],
            finish_reason=FinishReason.STOP if len(answer) <= room else FinishReason.LENGTH,
            priority=request.priority,
            arrival=self._num_requests,
            arrived_s=self._now_s,
            stall_after=next((f.after_tokens for f in faults if f.kind == "stall"), None),
        )
        self._num_requests += 1
        stream = _Stream(dies_after=next((f.after_tokens for f in faults if f.kind == "die"), None))
        self._streams[generation] = stream
        self._simulation.add(generation)
        self._wake.set()
        return generation, stream

    async def _run(self) -> None:
        """Take engine steps for ever: schedule, let its time pass, deliver what it sampled."""
        scale = self.config.time_scale
        max_repeats = 1 if scale else MAX_REPEATS
        loop = asyncio.get_running_loop()
        wall = loop.time()
        while True:
            await self._resumed.wait()
            step = self._simulation.schedule(self._now_s, max_repeats=max_repeats)
            if step is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            wall = max(wall + step.duration_s * scale, loop.time())
            await asyncio.sleep(wall - loop.time() if scale else 0)
            await self._resumed.wait()
            self._now_s += step.duration_s
            self.on_step(self._told(step))
            for generation, piece in self._simulation.update(step, self._now_s):
                self._deliver(generation, piece)

    def _deliver(self, generation: Generation, piece: EngineOutput) -> None:
        stream = self._streams.get(generation)
        if stream is None:
            return
        stream.num_tokens += len(piece.token_ids)
        if stream.dies_after is not None and stream.num_tokens >= stream.dies_after:
            self.die()
            return
        if piece.timing is not None:
            piece = EngineOutput(
                piece.token_ids,
                piece.num_cached_tokens,
                piece.finish_reason,
                self._scaled(piece.timing),
            )
        stream.pieces.put_nowait(piece)

    def _told(self, step: EngineStep) -> EngineStepStats:
        decoding = {g: n for g, n in step.num_tokens.items() if g.num_sampled}
        decode_tokens = sum(decoding.values())
        return EngineStepStats(
            duration_s=step.duration_s * self.config.time_scale,
            prefill_tokens=sum(step.num_tokens.values()) - decode_tokens,
            decode_tokens=decode_tokens,
            decode_requests=len(decoding),
        )

    def _scaled(self, timing: EngineTiming) -> EngineTiming:
        scale = self.config.time_scale
        return EngineTiming(
            timing.queue_s * scale, timing.prefill_s * scale, timing.decode_s * scale
        )

    def _make_answer(self, request: EngineRequest, prompt: str) -> str:
        seed = request.seed if request.temperature > 0 else 0
        rng = random.Random(f"{self.config.seed}/{seed}/{prompt}")
        if request.json_schema is None:
            return " ".join(rng.choices(WORDS, k=rng.randint(4, 12)))
        return json.dumps(make_instance(request.json_schema, rng), separators=(",", ":"))
