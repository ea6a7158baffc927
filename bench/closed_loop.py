"""A small closed loop of agents on any engine, to hold the simulated one against the real one."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass

from inference_service.engine.protocol import Engine, EngineRequest

FIRST_ID, LAST_ID = 1_000, 40_000
"""Token ids of made-up prompts: ordinary words of any vocabulary."""


@dataclass(frozen=True, slots=True)
class Loop:
    """Sessions that all start at once; each step's context is all before it and `new_tokens`."""

    sessions: int = 8
    steps: int = 3
    shared_tokens: int = 256
    first_tokens: int = 384
    new_tokens: int = 96
    max_tokens: int = 32
    tool_s: float = 1.0

    @property
    def longest(self) -> int:
        """Upper bound of a session's final context."""
        grown = self.steps * self.max_tokens + (self.steps - 1) * self.new_tokens
        return self.shared_tokens + self.first_tokens + grown


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a loop went. `lengths` are the tokens sampled by each request, by its id."""

    makespan_s: float
    prefix_hit: float
    preemptions: int
    lengths: Mapping[str, int]


async def run_loop(engine: Engine, loop: Loop, *, time_scale: float = 1.0) -> Outcome:
    """Run all sessions to their ends; tools sleep `tool_s` times the engine's time scale."""
    shared = made_up_ids(random.Random("shared"), loop.shared_tokens)
    lengths: dict[str, int] = {}
    cached = total = 0

    async def session(number: int) -> None:
        nonlocal cached, total
        rng = random.Random(number)
        context = [*shared, *made_up_ids(rng, loop.first_tokens)]
        for step in range(loop.steps):
            request = EngineRequest(f"{number}/{step}", context, loop.max_tokens)
            total += len(context)
            async with aclosing(engine.generate(request)) as outputs:
                pieces = [piece async for piece in outputs]
            sampled = [token for piece in pieces for token in piece.token_ids]
            cached += pieces[-1].num_cached_tokens
            lengths[request.request_id] = len(sampled)
            if step < loop.steps - 1:
                await asyncio.sleep(loop.tool_s * time_scale)
                context = [*context, *sampled, *made_up_ids(rng, loop.new_tokens)]

    before = (await engine.stats()).num_preemptions
    start_s = time.monotonic()
    await asyncio.gather(*map(session, range(loop.sessions)))
    return Outcome(
        makespan_s=(time.monotonic() - start_s) / time_scale,
        prefix_hit=cached / total,
        preemptions=(await engine.stats()).num_preemptions - before,
        lengths=lengths,
    )


def made_up_ids(rng: random.Random, count: int) -> list[int]:
    """Return `count` token ids of words."""
    return [rng.randint(FIRST_ID, LAST_ID) for _ in range(count)]
