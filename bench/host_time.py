"""What the service itself costs a step, by the size of the conversation that the step goes on.

`python -m bench.host_time [--json FILE]` starts an embedded stack for its PostgreSQL, and in this
process a service with the small model's tokenizer on the simulated engine. For each seed, one
session of each context size takes steps in turn, so that sizes are compared in one run, seconds
apart. Each step adds a user's message of a few words; its answer is a tool call, so the session
stays, as in an agent's turns.

`host_pre_s` is the step's own (claim, resolve, render, tokenise). `loop_s` is the CPU time of the
event loop's thread from a step's attachment to its end, less that of the same request to a second
simulated engine without a service: what other steps of the service must wait for. `opening_s` and
`longest_s` are the longest that the loop's thread works on end, in CPU seconds: in a session's
first step, which tokenises its whole prompt, and in its later ones. The simulated engine's part is
in them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import uvloop
from pydantic import JsonValue

from bench.stack import embedded_stack, simulated_service
from contracts.agent import Sampling
from contracts.llm_step import LLMStepInput, LLMStepResult, OutputForm
from contracts.message import ContextRef, Message, Role
from inference_service.engine.protocol import EngineRequest
from inference_service.engine.simulated import SimulatedConfig, SimulatedEngine
from inference_service.engine.tokenizer import TransformersTokenizer
from inference_service.model import prepare_model
from inference_service.service import InferenceService
from muster import exit as way_out
from muster.settings import Settings
from store.context import ContextStore
from store.database import Database

SIZES = (1_000, 10_000, 100_000)
TICK_S = 0.0005
WORDS = ("sea", "wide", "river", "runs", "under", "low", "grey", "sky", "and", "then", "stone")
ANSWER = '{"tool":"look","arguments":{}}'
LOOK: JsonValue = {
    "name": "look",
    "description": "Look.",
    "arguments": {"type": "object", "properties": {}},
}


class _Tokenizer(TransformersTokenizer):
    """The real one, but for the text of whole prompts, which only the simulated engine asks for."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of an answer; of anything longer, none."""
        return super().decode(token_ids) if len(token_ids) < min(SIZES) // 2 else ""


class _Session:
    """One conversation, and the measured parts of its steps, in seconds."""

    def __init__(self, size: int, seed: int, toolset: str) -> None:
        self.size = size
        self._toolset = toolset
        self.host_pre_s: list[float] = []
        self.host_post_s: list[float] = []
        self.loop_s: list[float] = []
        self.opening_s: list[float] = []
        self.longest_s: list[float] = []
        self._words = random.Random(seed)
        self._job_id = f"bench-{uuid4().hex}"
        self._base: ContextRef | None = None
        self._number = 0

    async def step(self, service: InferenceService) -> LLMStepResult:
        """Take the next step; the first one opens the conversation at its size."""
        num_words = 12 if self._base else self.size
        text = " ".join(self._words.choices(WORDS, k=num_words))
        step = LLMStepInput(
            step_id=f"{self._job_id}/bench/{self._number}",
            job_id=self._job_id,
            model="bench",
            base=self._base,
            append=(Message(role=Role.USER, content=text),),
            toolset=self._toolset,
            output=OutputForm(tools=("look",), may_answer=False),
            sampling=Sampling(max_tokens=32),
        )
        generation = await service.attach(step, b"bench")
        result = await generation.task
        service.detach(generation, b"bench", None)
        self._base = result.context
        self._number += 1
        return result


async def measure(
    database: Database, tokenizer: _Tokenizer, seeds: int, rounds: int
) -> list[_Session]:
    """Return the sessions of all seeds and sizes, measured."""
    asked: list[EngineRequest] = []

    def respond(request: EngineRequest, _prompt: str) -> str:
        asked.append(request)
        return ANSWER

    config = SimulatedConfig(num_blocks=40_000, max_model_len=200_000, time_scale=0.0)
    engine = SimulatedEngine(config, respond, tokenizer)
    twin = SimulatedEngine(config, lambda *_: ANSWER, tokenizer)
    service = await simulated_service(engine, database, replica="bench")
    await twin.start()
    toolset = await ContextStore(database).put_blob([LOOK])
    measured: list[_Session] = []
    for seed in range(seeds):
        sessions = [_Session(size, seed, toolset) for size in SIZES]
        for number in range(rounds + 2):
            for session in sessions:
                begun = time.thread_time()
                with _longest_work(session.longest_s if number else session.opening_s):
                    result = await session.step(service)
                both = time.thread_time() - begun
                begun = time.thread_time()
                await _run(twin, replace(asked[-1], request_id=f"twin-{asked[-1].request_id}"))
                if number >= 2:
                    session.loop_s.append(both - (time.thread_time() - begun))
                    session.host_pre_s.append(result.timing.host_pre_s)
                    session.host_post_s.append(result.timing.host_post_s)
        measured += sessions
    service.close()
    await twin.close()
    await engine.close()
    return measured


@contextmanager
def _longest_work(found: list[float]) -> Iterator[None]:
    """Add to `found` the longest CPU time of this thread between two turns of the event loop."""
    longest, last = 0.0, time.thread_time()

    def look() -> None:
        nonlocal longest, last
        now = time.thread_time()
        longest, last = max(longest, now - last), now

    async def watch() -> None:
        while True:
            look()
            await asyncio.sleep(TICK_S)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        look()
        found.append(longest)


async def _run(engine: SimulatedEngine, request: EngineRequest) -> None:
    async with aclosing(engine.generate(request)) as pieces:
        async for _ in pieces:
            pass


def figures_of(sessions: Sequence[_Session]) -> dict[str, Any]:
    """Return medians by size, in seconds, and their ratios to the smallest size's."""
    names = ("host_pre_s", "host_post_s", "loop_s", "opening_s", "longest_s")
    by_size: dict[int, dict[str, float]] = {}
    for size in SIZES:
        own = [session for session in sessions if session.size == size]
        by_size[size] = {
            name: statistics.median(s for session in own for s in getattr(session, name))
            for name in names
        }
    smallest, largest = by_size[SIZES[0]], by_size[SIZES[-1]]
    per_seed = [
        statistics.median(large.host_pre_s) / statistics.median(small.host_pre_s)
        for small, large in zip(sessions[::3], sessions[2::3], strict=True)
    ]
    return {
        "context_tokens": by_size,
        "host_pre_ratio": largest["host_pre_s"] / smallest["host_pre_s"],
        "host_pre_ratio_of_seeds": per_seed,
        "loop_ratio": largest["loop_s"] / smallest["loop_s"],
    }


async def _measure(database_url: str, data_dir: Path, seeds: int, rounds: int) -> dict[str, Any]:
    tokenizer = _Tokenizer(prepare_model("smollm2", data_dir, print, with_weights=False).path)
    database = Database(database_url)
    try:
        return figures_of(await measure(database, tokenizer, seeds, rounds))
    finally:
        await database.close()


def main() -> int:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40, help="steps of each session")
    given = parser.parse_args()
    data_dir = Settings().data_dir
    with embedded_stack(engine="simulated", simulated_time_scale="0") as stack:
        figures = uvloop.run(_measure(stack.database_url, data_dir, given.seeds, given.rounds))
    heads = ("host_pre", "host_post", "event loop", "opening", "longest")
    print(f"{'tokens':>10}" + "".join(f"{f'{head}, ms':>16}" for head in heads))
    for size, row in figures["context_tokens"].items():
        print(f"{size:>10,}" + "".join(f"{1e3 * value:>16.2f}" for value in row.values()))
    told = ", ".join(f"{ratio:.2f}" for ratio in figures["host_pre_ratio_of_seeds"])
    print(f"host_pre, largest to smallest: {figures['host_pre_ratio']:.2f} (of seeds: {told})")
    print(f"event loop, largest to smallest: {figures['loop_ratio']:.2f}")
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    way_out.run(main)
