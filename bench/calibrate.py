"""How far the simulated engine is from the real one, and the costs that bring it nearest.

`python -m bench.calibrate MODEL [--json FILE]` measures engine steps of vLLM on this machine
(prompts alone, decoding batches, both at once), fits `CostModel` to them, and then runs the same
small closed loop on the real engine and on the simulated one with those costs: with room for all
sessions, and with room for half of them. Run it on an idle machine. MODEL is the directory of a
checkpoint (`python -m inference_service.model smollm2 DIRECTORY` prepares one).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.closed_loop import Loop, Outcome, made_up_ids, run_loop
from bench.fit import Measured, Work, errors, fit
from inference_service.engine.protocol import Engine, EngineOutput, EngineRequest
from inference_service.engine.simulated import SimulatedConfig, SimulatedEngine
from inference_service.engine.simulation import CostModel
from inference_service.engine.vllm import VLLMConfig, VLLMEngine

CHUNK = 512
"""Tokens of one engine step, the adapter's choice on CPUs."""

PROMPTS = (64, 128, 192, 256, 384, 512, 1_024, 2_048)
BATCHES = (
    (1, 64),
    (4, 64),
    (8, 64),
    (16, 64),
    (32, 64),
    (1, 1_536),
    (4, 1_024),
    (8, 512),
    (16, 512),
)
"""Decoding: (sequences, tokens of each before the answer)."""
MIXED = tuple(itertools.product((4, 8, 16), (64, 128, 256, 448)))
"""Decoding sequences, and tokens of the prompt that joins them."""
REPEATS = 2
ANSWER = 48
MIN_STEPS = 8
"""Fewer steps between the last that starts and the first that ends measure nothing."""

LOOP = Loop()
LOOP_SEATS = 8
TIGHT_BLOCKS = 90
"""About half of what the loop's sessions fill in the end."""
TIME_SCALE = 0.5

IDLE_S = 30.0

_numbers = itertools.count()


@asynccontextmanager
async def started(config: VLLMConfig) -> AsyncIterator[VLLMEngine]:
    """Yield a started engine."""
    engine = VLLMEngine(config)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def measure(engine: Engine) -> list[Measured]:
    """Return all measured engine steps; each point is the fastest of `REPEATS`."""
    rng = random.Random(0)
    rows: list[Measured] = []
    for count in PROMPTS:
        tries = [await _prompt(engine, rng, count) for _ in range(REPEATS)]
        rows.append(Measured("prefill", _chunks(count), min(tries)))
    for batch, context in BATCHES:
        decoded = [await _decode(engine, rng, batch, context) for _ in range(REPEATS)]
        rows.append(min(decoded, key=lambda row: row.duration_s))
    for batch, count in MIXED:
        mixed = [await _mixed(engine, rng, batch, count) for _ in range(REPEATS)]
        rows.append(min(mixed, key=lambda row: row.duration_s))
    return rows


def _chunks(count: int) -> Work:
    work = Work()
    for start in range(0, count, CHUNK):
        work += Work.step(prefill=[(min(CHUNK, count - start), start)])
    return work


async def _prompt(engine: Engine, rng: random.Random, count: int) -> float:
    """Return the seconds from the first engine step of a prompt to the end of its last."""
    pieces = [piece async for piece, _ in _pieces(engine, made_up_ids(rng, count), 1)]
    assert pieces[-1].timing is not None
    return pieces[-1].timing.prefill_s


async def _decode(engine: Engine, rng: random.Random, batch: int, context: int) -> Measured:
    """Measure the steps in which all of a batch decode."""
    times: list[list[float]] = [[] for _ in range(batch)]

    async def follow(stamps: list[float]) -> None:
        async for piece, at_s in _pieces(engine, _words(engine, rng, context), ANSWER):
            stamps += [at_s] * len(piece.token_ids)

    await asyncio.gather(*map(follow, times))
    begin, end = max(stamps[0] for stamps in times), min(stamps[-1] for stamps in times)
    inside = [at for at in min(times, key=len) if begin < at <= end]
    steps = len(inside)
    assert steps >= MIN_STEPS, (batch, context, steps)
    middle = context + ANSWER // 2
    return Measured("decode", Work.step(decode=[middle] * batch), (inside[-1] - begin) / steps)


async def _mixed(engine: Engine, rng: random.Random, batch: int, count: int) -> Measured:
    """Measure the one step in which a batch decodes and a prompt is computed."""
    decoding = asyncio.Semaphore(0)

    async def follow() -> None:
        async for _ in _pieces(engine, _words(engine, rng, 64), 4 * ANSWER):
            decoding.release()

    followers = [asyncio.create_task(follow()) for _ in range(batch)]
    for _ in range(3 * batch):  # by then each has begun
        await decoding.acquire()
    running = (await engine.stats()).num_running
    duration_s = await _prompt(engine, rng, count)
    for follower in followers:
        follower.cancel()
    await asyncio.gather(*followers, return_exceptions=True)
    await _until_idle(engine)
    return Measured("mixed", Work.step(prefill=[(count, 0)], decode=[72] * running), duration_s)


async def _until_idle(engine: Engine) -> None:
    """Wait until what was aborted has left."""
    async with asyncio.timeout(IDLE_S):
        while not await engine.reset_prefix_cache():  # noqa: ASYNC110  the engine tells nobody
            await asyncio.sleep(0.01)


def _words(engine: Engine, rng: random.Random, count: int) -> list[int]:
    """Return a prompt that a model goes on with, instead of ending: a long list of numbers."""
    text = ", ".join(str(rng.randint(100, 999)) for _ in range(count))
    return engine.tokenizer.encode(text, split_special=True)[:count]


async def _pieces(
    engine: Engine, ids: list[int], max_tokens: int
) -> AsyncIterator[tuple[EngineOutput, float]]:
    clock = asyncio.get_running_loop().time
    request = EngineRequest(f"calibrate-{next(_numbers)}", ids, max_tokens)
    async for piece in engine.generate(request):
        yield piece, clock()


async def simulate(
    cost: CostModel, loop: Loop, num_blocks: int, lengths: Mapping[str, int]
) -> Outcome:
    """Run the loop on the simulated engine, with answers as long as the real ones were."""
    engine = SimulatedEngine(
        SimulatedConfig(
            max_num_seqs=LOOP_SEATS,
            num_blocks=num_blocks,
            max_model_len=min(loop.longest + 1, num_blocks * 32),
            max_num_batched_tokens=CHUNK,
            cost=cost,
            time_scale=TIME_SCALE,
        ),
        lambda request, _prompt: "x" * (lengths[request.request_id] - 1),
    )
    await engine.start()
    try:
        return await run_loop(engine, loop, time_scale=TIME_SCALE)
    finally:
        await engine.close()


def compared(real: Outcome, simulated: Outcome) -> dict[str, Any]:
    """Return both outcomes and the simulated one's error."""
    return {
        "real": _figures(real),
        "simulated": _figures(simulated),
        "makespan_error": simulated.makespan_s / real.makespan_s - 1,
        "prefix_hit_error": simulated.prefix_hit - real.prefix_hit,
    }


def _figures(outcome: Outcome) -> dict[str, Any]:
    return {key: value for key, value in asdict(outcome).items() if key != "lengths"}


async def calibrate(model: Path) -> dict[str, Any]:
    """Measure, fit and compare; returns all figures."""
    async with started(VLLMConfig(model, max_num_seqs=32, max_model_len=2_304)) as engine:
        rows = await measure(engine)
    cost = fit(rows)
    figures: dict[str, Any] = {
        "cost": asdict(cost),
        "error": errors(cost, rows),
        "rows": [asdict(row) for row in rows],
        "loop": asdict(LOOP),
    }
    for name, blocks in (("roomy", None), ("tight", TIGHT_BLOCKS)):
        config = VLLMConfig(
            model,
            max_num_seqs=LOOP_SEATS,
            max_model_len=LOOP.longest + 1,
            num_gpu_blocks_override=blocks,
        )
        async with started(config) as engine:
            real = await run_loop(engine, LOOP)
        # one block of a real cache is vLLM's placeholder
        simulated = await simulate(cost, LOOP, (blocks or 1_024) - 1, real.lengths)
        figures[name] = compared(real, simulated)
    figures["load_average"] = os.getloadavg()
    return figures


def _print(figures: dict[str, Any]) -> None:
    for name, cost in figures["cost"].items():
        print(f"{name:<18}{1e6 * cost:14.3f} µs")
    for kind, error in figures["error"].items():
        print(
            f"error of {kind:<8} median {error['median_error']:6.1%}, worst "
            f"{error['worst_error']:6.1%}, bias {error['bias']:+6.1%}"
        )
    for name in ("roomy", "tight"):
        _print_loop(name, figures[name])


def _print_loop(name: str, loop: dict[str, Any]) -> None:
    real, simulated = loop["real"], loop["simulated"]
    print(
        f"{name} loop: makespan {real['makespan_s']:.1f} s real, {simulated['makespan_s']:.1f} s "
        f"simulated ({loop['makespan_error']:+.1%}); prefix hit {real['prefix_hit']:.1%} and "
        f"{simulated['prefix_hit']:.1%}; preemptions {real['preemptions']} and "
        f"{simulated['preemptions']}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the calibration from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="directory of a checkpoint")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    figures = asyncio.run(calibrate(options.model))
    _print(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
