"""Requests for an engine, and what came of them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from inference_service.engine.protocol import (
    Engine,
    EngineCapacity,
    EngineOutput,
    EngineRequest,
)

DEADLINE_S = 60.0
"""A generation of these tests takes seconds; on a machine with much other work, more."""

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Running:
    """A started engine and what `start` said of it."""

    engine: Engine
    capacity: EngineCapacity

    def request(self, text: str, max_tokens: int = 16, **options: Any) -> EngineRequest:
        """Return a request with `text` as the user's message."""
        tokenizer = self.engine.tokenizer
        prompt = tokenizer.render([{"role": "user", "content": text}], add_generation_prompt=True)
        return EngineRequest(
            request_id=f"request-{next(_numbers)}",
            prompt_token_ids=tokenizer.encode(prompt, split_special=False),
            max_tokens=max_tokens,
            **options,
        )


@dataclass(frozen=True, slots=True)
class Ended:
    """A generation that ran to its end."""

    pieces: list[EngineOutput]
    wall_s: float

    @property
    def token_ids(self) -> list[int]:
        """All sampled ids."""
        return [token for piece in self.pieces for token in piece.token_ids]

    @property
    def last(self) -> EngineOutput:
        """The piece that says how it ended."""
        return self.pieces[-1]


async def run(engine: Engine, request: EngineRequest) -> Ended:
    """Run a request to its end."""
    start_s = time.monotonic()
    async with asyncio.timeout(DEADLINE_S), aclosing(engine.generate(request)) as outputs:
        pieces = [piece async for piece in outputs]
    return Ended(pieces, time.monotonic() - start_s)


async def until(holds: Callable[[], Awaitable[bool]], within_s: float) -> None:
    """Wait until a condition holds; fails if it takes longer than `within_s` seconds."""
    async with asyncio.timeout(within_s):
        while not await holds():
            await asyncio.sleep(0.005)


async def is_idle(engine: Engine) -> bool:
    """Whether no request is left in the engine and no KV block is referenced."""
    stats = await engine.stats()
    return (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
