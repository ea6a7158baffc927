"""Touches: engine requests that belong to no step, made to keep or to bring back a session's KV.

A touch is the beginning of a waiting session's context and one sampled token, which nobody reads.
What it computes goes to one account, `Overhead`, never to a step.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import timedelta

from contracts.error import MusterError
from inference_service.engine.protocol import Capability, Engine, EngineRequest
from inference_service.gpu_ledger import Fate, GPULedger

log = logging.getLogger(__name__)

TOUCH_PRIORITY = 100
"""Behind every step, whose priorities are 1 to 5."""

FAILURE_PAUSE_S = 0.1
"""A failure is told no sooner than this: a scheduler that asks again at once must not spin."""

FAILED = -1
"""`TouchDone.cached_tokens` of a touch that came to nothing."""


@dataclass(slots=True)
class Overhead:
    """What touches have cost since the start, in requests and tokens.

    `cached_tokens` of the `prompt_tokens` were in the prefix cache, the others were computed.
    """

    refreshes: int = 0
    prewarms: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def computed_tokens(self) -> int:
        """Tokens the engine computed for touches."""
        return self.prompt_tokens - self.cached_tokens + self.completion_tokens


class Touches:
    """Makes touches; `done` tells the end of each, whatever it is.

    Told are the session, how many tokens were cached before (or `FAILED`), and how many are now.
    """

    def __init__(
        self,
        engine: Engine,
        done: Callable[[str, int, int], None],
        gpu: GPULedger,
        clock: Callable[[], float],
        *,
        timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        self._engine = engine
        self._done = done
        self._gpu = gpu
        self._clock = clock
        self._timeout_s = timeout.total_seconds()
        self._tasks: dict[asyncio.Task[int], tuple[str, int]] = {}
        self._number = 0
        self._closed = False
        self.overhead = Overhead()

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self, session: str, token_ids: array[int] | None, num_tokens: int) -> None:
        """Touch the first `num_tokens` of a session's ids (None: they are not kept)."""
        prompt = [] if token_ids is None else token_ids[:num_tokens].tolist()
        self._number += 1
        name = f"touch-{self._number}"
        task = asyncio.create_task(self._touch(name, session, prompt), name=name)
        self._tasks[task] = session, max(0, len(prompt) - 1)
        task.add_done_callback(self._ended)

    def close(self) -> None:
        """Abort what runs; whatever is begun from now on fails."""
        self._closed = True
        for task in self._tasks:
            task.cancel()

    def forget(self) -> None:
        """Abort what runs and tell nobody: the engine is lost, and everything in it."""
        tasks = list(self._tasks)
        self._tasks.clear()
        for task in tasks:
            task.cancel()

    def _ended(self, task: asyncio.Task[int]) -> None:
        begun = self._tasks.pop(task, None)
        if begun is None:
            return
        cached = FAILED if task.cancelled() else task.result()
        if cached == FAILED:
            self.overhead.failures += 1
        self._done(begun[0], cached, begun[1])

    async def _touch(self, name: str, session: str, prompt: list[int]) -> int:
        """Return how many tokens were cached, or, after a pause, `FAILED`."""
        cached = FAILED if self._closed or not prompt else await self._cached(name, session, prompt)
        if cached == FAILED:
            await asyncio.sleep(FAILURE_PAUSE_S)
        return cached

    async def _cached(self, name: str, session: str, prompt: list[int]) -> int:
        request = EngineRequest(name, prompt, max_tokens=1, priority=TOUCH_PRIORITY)
        cached = FAILED
        self._gpu.entered(name, num_prompt=len(prompt), num_known=len(prompt), now=self._clock())
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                aclosing(self._engine.generate(request)) as pieces,
            ):
                async for piece in pieces:
                    cached = max(cached, piece.num_cached_tokens)
                    self.overhead.completion_tokens += len(piece.token_ids)
        except (MusterError, TimeoutError) as error:
            log.warning("session %s was not touched: %s", session, error or "no answer in time")
            return FAILED
        except Exception:
            # A touch that is never told of would hold back every step.
            log.exception("session %s was not touched: a fault of the service", session)
            return FAILED
        finally:
            self._gpu.ended(name, self._clock())
            self._gpu.settle(name, Fate.TOUCH)
        if Capability.CACHED_TOKENS not in self._engine.capabilities:
            cached = len(prompt) - 1  # nobody tells; what was asked for is there now
        self.overhead.prompt_tokens += len(prompt)
        self.overhead.cached_tokens += cached
        return cached
