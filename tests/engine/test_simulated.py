"""What the simulated engine adds: a cost model, exact caching, preemption, faults on demand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from contracts.llm_step import FinishReason
from inference_service.engine.protocol import EngineDeadError, EngineRequest
from inference_service.engine.simulated import (
    Fault,
    Respond,
    SimulatedConfig,
    SimulatedEngine,
)
from inference_service.engine.simulation import CostModel
from tests.engine.request import Ended, is_idle, run, until

WITHIN_S = 10.0


@asynccontextmanager
async def started(respond: Respond | None = None, **config: Any) -> AsyncIterator[SimulatedEngine]:
    """Yield a started engine that waits for nothing unless told so."""
    engine = SimulatedEngine(SimulatedConfig(**{"time_scale": 0.0, **config}), respond)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def request(name: str, num_tokens: int = 64, max_tokens: int = 64, **options: Any) -> EngineRequest:
    """Return a request whose prompt is its name, repeated."""
    prompt = (name.encode() * num_tokens)[:num_tokens]
    return EngineRequest(name, list(prompt), max_tokens, **options)


def says(text: str) -> Respond:
    """Return a `respond` that always says the same."""
    return lambda _request, _prompt: text


async def test_answers_are_the_same_in_every_engine_and_at_every_time_scale() -> None:
    answers = []
    for scale in (0.0, 0.01):
        async with started(time_scale=scale) as engine:
            ended = await asyncio.gather(*(run(engine, request(name)) for name in "abcdef"))
            answers.append([end.token_ids for end in ended])
    assert answers[0] == answers[1]


async def test_seed_of_the_config_changes_the_answers() -> None:
    answers = []
    for seed in (1, 2):
        async with started(seed=seed) as engine:
            answers.append((await run(engine, request("a"))).token_ids)
    assert answers[0] != answers[1]


async def test_seed_of_a_sampled_request_decides_its_answer() -> None:
    async with started() as engine:
        ended = [await run(engine, request("a", temperature=1.0, seed=seed)) for seed in (1, 2, 1)]
    assert ended[0].token_ids == ended[2].token_ids != ended[1].token_ids


async def test_respond_gets_the_prompt_as_text_and_decides_the_answer() -> None:
    async with started(lambda _request, prompt: prompt.upper()) as engine:
        ended = await run(engine, request("abc", num_tokens=3))
    assert engine.tokenizer.decode(ended.token_ids) == "ABC"
    assert ended.last.finish_reason is FinishReason.STOP


async def test_without_time_it_serves_hundreds_of_steps_a_second() -> None:
    async with started(max_num_seqs=64) as engine:
        start_s = time.process_time()
        for _ in range(10):
            names = [f"job {number} " for number in range(50)]
            await asyncio.gather(*(run(engine, request(name, 1_500)) for name in names))
        assert time.process_time() - start_s < 500 / 300


async def _decode_s(engine: SimulatedEngine, count: int) -> float:
    ended = await asyncio.gather(*(run(engine, request(f"{n} ", 8)) for n in range(count)))
    return max(end.last.timing.decode_s for end in ended if end.last.timing)


async def test_decode_slows_down_with_the_batch_but_less_than_in_proportion() -> None:
    cost = CostModel(step_s=0.001, decode_seq_s=0.000_1)
    async with started(says("x" * 19), time_scale=1.0, cost=cost) as engine:
        alone_s, together_s = await _decode_s(engine, 1), await _decode_s(engine, 8)
    assert alone_s < together_s < 8 * alone_s


async def test_long_prompt_is_computed_in_chunks_between_which_others_decode() -> None:
    cost = CostModel(step_s=0.001, prefill_token_s=0.000_02)
    async with started(
        says("x" * 200), time_scale=1.0, cost=cost, max_num_batched_tokens=128
    ) as engine:
        order: list[str] = []

        async def follow(req: EngineRequest) -> None:
            async for piece in engine.generate(req):
                order.extend([req.request_id] * len(piece.token_ids))

        short = asyncio.create_task(follow(request("short", 8, 200)))
        await until(_has(order, 1), WITHIN_S)
        await follow(request("long", 2_000, 1))
        before_long = order.index("long")
        await short
    assert before_long >= 2_000 // 128


def _has(items: list[str], count: int) -> Callable[[], Coroutine[Any, Any, bool]]:
    async def holds() -> bool:
        return len(items) >= count

    return holds


async def test_prefix_cache_shares_whole_blocks_and_evicts_the_longest_released() -> None:
    async with started(says("x"), num_blocks=8, block_size=16, max_model_len=128) as engine:
        assert (await run(engine, request("a", 63))).last.num_cached_tokens == 0
        assert (await run(engine, request("a", 63))).last.num_cached_tokens == 48
        assert (await run(engine, request("b", 63))).last.num_cached_tokens == 0
        assert (await run(engine, request("a", 63))).last.num_cached_tokens == 48
        await run(engine, request("c", 63))  # takes the blocks of b, released before those of a
        assert (await run(engine, request("a", 63))).last.num_cached_tokens == 48
        assert (await run(engine, request("b", 63))).last.num_cached_tokens == 0


async def test_next_turn_finds_the_blocks_of_its_sampled_tokens() -> None:
    async with started(says("y" * 40), block_size=16) as engine:
        first = request("a", 40)
        sampled = (await run(engine, first)).token_ids
        longer = [*first.prompt_token_ids, *sampled, *b"and more"]
        second = await run(engine, EngineRequest("second", longer, 8))
        assert second.last.num_cached_tokens == 80


async def test_requests_in_the_same_engine_step_share_their_prefix() -> None:
    async with started() as engine:
        ended = await asyncio.gather(*(run(engine, request("same", 320)) for _ in range(4)))
    assert sorted(end.last.num_cached_tokens for end in ended) == [0, 288, 288, 288]


async def test_lower_priority_number_is_served_first_when_seats_are_full() -> None:
    async with started(says("x"), max_num_seqs=1) as engine:
        order: list[int] = []

        async def follow(name: str, priority: int) -> None:
            await run(engine, request(name, priority=priority))
            order.append(priority)

        await asyncio.gather(follow("a", 5), follow("b", 3), follow("c", 1), follow("d", 3))
    assert order == [1, 3, 3, 5]


async def test_preempted_requests_end_with_the_same_answers() -> None:
    def ids(ended: list[Ended]) -> list[list[int]]:
        return [end.token_ids for end in ended]

    requests = [request(f"job {number} ", 500, 200) for number in range(12)]
    respond = says("z" * 150)
    async with started(respond) as engine:
        roomy = await asyncio.gather(*(run(engine, req) for req in requests))
    async with started(respond, num_blocks=64, max_model_len=2_048) as engine:
        tight = await asyncio.gather(*(run(engine, req) for req in requests))
        assert (await engine.stats()).num_preemptions > 0
        assert await is_idle(engine)
        engine.check_integrity()
    assert ids(tight) == ids(roomy)


async def test_prompt_begins_only_when_all_of_it_fits() -> None:
    config = {"num_blocks": 6, "block_size": 16, "max_model_len": 96, "max_num_batched_tokens": 24}
    async with started(says("xxx"), **config) as engine:
        ended = await asyncio.gather(*(run(engine, request(name, 60)) for name in "abc"))
        assert (await engine.stats()).num_preemptions == 0
    assert [len(end.token_ids) for end in ended] == [4, 4, 4]


async def test_stalled_request_stays_silent_until_aborted_while_others_go_on() -> None:
    fault = Fault("stall", request=0, after_tokens=3)
    async with started(says("answer"), faults=(fault,)) as engine:
        outputs = engine.generate(request("a"))
        sampled = 0
        while sampled < 3:
            sampled += len((await anext(outputs)).token_ids)
        waiting = asyncio.create_task(anext(outputs))
        assert (await run(engine, request("b"))).last.finish_reason is FinishReason.STOP
        assert not waiting.done()
        assert (await engine.stats()).num_running == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert await is_idle(engine)


async def test_stalled_engine_looks_healthy_and_resumes() -> None:
    async with started(says("done")) as engine:
        engine.stall()
        running = asyncio.create_task(run(engine, request("a")))
        await until(lambda: _has_waiting(engine), WITHIN_S)
        await engine.check_health()
        assert not running.done()
        engine.resume()
        assert (await running).last.finish_reason is FinishReason.STOP


async def _has_waiting(engine: SimulatedEngine) -> bool:
    return (await engine.stats()).num_waiting == 1


async def test_death_loses_every_request_and_a_new_start_serves_again() -> None:
    faults = (Fault("die", request=1, after_tokens=2),)
    async with started(says("long " * 10), time_scale=0.1, faults=faults) as engine:
        ended = await asyncio.gather(
            *(run(engine, request(name)) for name in "abc"), return_exceptions=True
        )
        assert [type(end) for end in ended] == [EngineDeadError] * 3
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        with pytest.raises(EngineDeadError):
            await run(engine, request("d"))
        await engine.start()
        await run(engine, request("e"))


async def test_closing_ends_requests_in_flight_with_an_error() -> None:
    engine = SimulatedEngine()
    await engine.start()
    running = asyncio.create_task(run(engine, request("a")))
    await until(lambda: _is_running(engine), WITHIN_S)
    await engine.close()
    with pytest.raises(EngineDeadError):
        await running


async def _is_running(engine: SimulatedEngine) -> bool:
    return (await engine.stats()).num_running == 1
