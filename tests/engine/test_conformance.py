"""What holds for every engine, the real one and the simulated one alike."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from contracts.llm_step import FinishReason
from inference_service.engine.cache_mirror import CacheMirror
from inference_service.engine.protocol import (
    Capability,
    EngineRequest,
    EngineRequestError,
    EngineStepStats,
    ignore_step,
)
from tests.engine.request import DEADLINE_S, Running, is_idle, run, until

pytestmark = pytest.mark.timeout(600)  # the first test of an engine waits for its start

LONG_TEXT: dict[str, Any] = {"type": "string", "minLength": 1_000}

ABORT_S = 2.0

MIRROR_S = 2.0
"""Events come within a tenth of a second; a machine with much other work takes longer."""

TOOL_CALL: dict[str, Any] = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "tool": {"const": "weather"},
                "arguments": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string", "minLength": 1, "maxLength": 12},
                        "day": {"enum": ["today", "tomorrow"]},
                    },
                    "required": ["city", "day"],
                    "additionalProperties": False,
                },
            },
            "required": ["tool", "arguments"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"answer": {"type": "string", "maxLength": 12}},
            "required": ["answer"],
            "additionalProperties": False,
        },
    ]
}


def test_capacity_is_sane(running: Running) -> None:
    capacity = running.capacity
    assert capacity.max_num_seqs == 8
    assert capacity.max_model_len == 1_024
    assert capacity.block_size == 32
    assert capacity.kv_tokens >= capacity.max_model_len
    assert capacity.max_num_batched_tokens >= capacity.max_num_seqs
    assert running.engine.blocks(capacity.block_size) == 1
    assert running.engine.blocks(capacity.block_size + 1) == 2


async def test_output_never_exceeds_max_tokens_and_says_that_it_was_cut(running: Running) -> None:
    ended = await run(running.engine, running.request("Tell me a long story.", max_tokens=3))
    assert len(ended.token_ids) == 3
    assert ended.last.finish_reason is FinishReason.LENGTH
    assert all(piece.finish_reason is None for piece in ended.pieces[:-1])


async def test_same_request_gives_same_output(running: Running) -> None:
    text = "Name three colours."
    first = await run(running.engine, running.request(text, seed=7))
    again = await run(running.engine, running.request(text, seed=7))
    assert again.token_ids == first.token_ids


async def test_sampled_request_with_a_seed_and_a_long_prompt_ends(running: Running) -> None:
    words = running.engine.tokenizer.encode("word " * 900, split_special=True)[:900]
    ended = await run(running.engine, EngineRequest("long", words, 8, temperature=0.7, seed=7))
    assert 1 <= len(ended.token_ids) <= 8


async def test_structured_output_satisfies_its_schema(running: Running) -> None:
    request = running.request("Weather in Paris tomorrow?", 128, json_schema=TOOL_CALL)
    ended = await run(running.engine, request)
    text = running.engine.tokenizer.decode(ended.token_ids)
    jsonschema.validate(json.loads(text), TOOL_CALL)
    assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
    assert ended.last.finish_reason is FinishReason.STOP


async def test_end_of_turn_is_among_the_sampled_ids(running: Running) -> None:
    schema = {"enum": ["yes", "no"]}
    ended = await run(running.engine, running.request("Yes or no?", 16, json_schema=schema))
    assert ended.token_ids[-1] == running.engine.tokenizer.eos_token_id
    assert running.engine.tokenizer.decode(ended.token_ids) in ('"yes"', '"no"')


async def test_second_request_with_the_same_prompt_hits_the_prefix_cache(running: Running) -> None:
    assert await running.engine.reset_prefix_cache()
    text = "The same words again and again. " * 8
    first = await run(running.engine, running.request(text, 2))
    request = running.request(text, 2)
    second = await run(running.engine, request)
    block = running.capacity.block_size
    assert first.last.num_cached_tokens == 0
    expected = (len(request.prompt_token_ids) - 1) // block * block
    assert second.last.num_cached_tokens == expected
    if Capability.CACHED_TOKENS_AT_ONCE in running.engine.capabilities:
        assert {piece.num_cached_tokens for piece in second.pieces} == {expected}


async def test_every_engine_step_is_told_with_the_tokens_it_computed(running: Running) -> None:
    steps: list[EngineStepStats] = []
    running.engine.on_step = steps.append
    try:
        request = running.request("Count to ten, and then to twenty. " * 20, 6)
        ended = await run(running.engine, request)
    finally:
        running.engine.on_step = ignore_step
    if Capability.STEPS not in running.engine.capabilities:
        assert not steps
        return
    computed = len(request.prompt_token_ids) - ended.last.num_cached_tokens
    assert sum(step.prefill_tokens for step in steps) == computed
    assert sum(step.decode_tokens for step in steps) >= len(ended.token_ids) - 1
    assert all(step.decode_requests <= 1 and step.duration_s >= 0 for step in steps)


async def test_closing_the_generator_aborts_and_frees_the_cache(running: Running) -> None:
    outputs = running.engine.generate(running.request("Tell me a long story.", max_tokens=800))
    await anext(outputs)
    stats = await running.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 0)
    assert stats.kv_cache_usage > 0
    await outputs.aclose()
    await until(lambda: is_idle(running.engine), ABORT_S)


async def test_cancelling_the_consumer_aborts(running: Running) -> None:
    request = running.request("Tell me a long story.", max_tokens=800)
    started = asyncio.Event()

    async def consume() -> None:
        async for _ in running.engine.generate(request):
            started.set()

    consumer = asyncio.create_task(consume())
    await asyncio.wait_for(started.wait(), DEADLINE_S)
    consumer.cancel()
    await asyncio.gather(consumer, return_exceptions=True)
    await until(lambda: is_idle(running.engine), ABORT_S)


async def test_prompt_that_leaves_no_room_is_refused_with_both_numbers(running: Running) -> None:
    limit = running.capacity.max_model_len
    request = EngineRequest("too-long", [65] * limit, max_tokens=1)
    with pytest.raises(EngineRequestError, match=r"1,024 tokens.*1,024 tokens"):
        await run(running.engine, request)
    assert await is_idle(running.engine)


async def test_empty_prompt_is_refused(running: Running) -> None:
    with pytest.raises(EngineRequestError, match="prompt of 0 tokens"):
        await run(running.engine, EngineRequest("empty", [], max_tokens=1))


async def test_answer_ends_where_the_context_window_does(running: Running) -> None:
    prompt = running.engine.tokenizer.encode("word " * 1_024, split_special=True)
    room = 5
    request = EngineRequest("tight", prompt[: running.capacity.max_model_len - room], 100)
    ended = await run(running.engine, request)
    assert 1 <= len(ended.token_ids) <= room
    if len(ended.token_ids) < room:
        assert ended.last.finish_reason is FinishReason.STOP


async def test_schema_that_no_value_can_satisfy_is_refused(running: Running) -> None:
    request = running.request("Anything.", json_schema={"type": "nonsense"})
    with pytest.raises(EngineRequestError, match="nonsense"):
        await run(running.engine, request)


async def test_more_requests_than_seats_all_end(running: Running) -> None:
    count = 3 * running.capacity.max_num_seqs
    requests = [running.request(f"Write {n} words about item {n}.", 4 + n) for n in range(count)]
    ended = await asyncio.gather(*(run(running.engine, request) for request in requests))
    for request, end in zip(requests, ended, strict=True):
        assert 1 <= len(end.token_ids) <= request.max_tokens
        assert end.last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    await until(lambda: is_idle(running.engine), ABORT_S)


async def test_any_priority_is_accepted(running: Running) -> None:
    requests = [running.request("Hello.", 2, priority=priority) for priority in (-5, 0, 1, 5)]
    ended = await asyncio.gather(*(run(running.engine, request) for request in requests))
    assert all(len(end.token_ids) >= 1 for end in ended)


async def test_parts_of_the_time_are_positive_and_fit_into_the_whole(running: Running) -> None:
    ended = await run(running.engine, running.request("Count to twenty. " * 20, 12))
    timing = ended.last.timing
    assert timing is not None
    assert all(piece.timing is None for piece in ended.pieces[:-1])
    parts = (timing.queue_s, timing.prefill_s, timing.decode_s)
    assert min(parts) >= 0
    assert 0.2 * ended.wall_s < sum(parts) < ended.wall_s + 0.01


async def test_prefix_cache_can_be_reset_only_when_idle(running: Running) -> None:
    outputs = running.engine.generate(running.request("Tell me a long story.", max_tokens=800))
    await anext(outputs)
    assert not await running.engine.reset_prefix_cache()
    await outputs.aclose()
    await until(lambda: is_idle(running.engine), ABORT_S)
    assert await running.engine.reset_prefix_cache()


def a_cache(running: Running) -> CacheMirror:
    """Return the engine's mirror; skips where the engine does not tell what it holds."""
    if running.engine.cache is None:
        pytest.skip("this engine does not tell what its prefix cache holds")
    return running.engine.cache


async def until_cached(running: Running, token_ids: Sequence[int], num_tokens: int) -> None:
    """Wait until the mirror says that so many of these tokens are cached."""
    cache = a_cache(running)

    async def holds() -> bool:
        return cache.num_cached_tokens(token_ids) == num_tokens

    await until(holds, MIRROR_S)


def whole_blocks(running: Running, token_ids: Sequence[int]) -> int:
    """Return how many of these tokens a cache can hold: the last is always computed."""
    return (len(token_ids) - 1) // running.capacity.block_size * running.capacity.block_size


@pytest.mark.parametrize("num_tokens", [320, 333])
async def test_cache_says_what_the_same_request_will_find_cached(
    running: Running, num_tokens: int
) -> None:
    a_cache(running)
    assert await running.engine.reset_prefix_cache()
    words = running.engine.tokenizer.encode("some words of this " * 200, split_special=True)
    prompt = words[:num_tokens]
    ended = await run(running.engine, EngineRequest(f"same-{num_tokens}", prompt, 4))
    assert ended.last.num_cached_tokens == 0
    for number in range(2):  # an aligned prompt has its last block computed, and held, again
        await until_cached(running, prompt, whole_blocks(running, prompt))
        ended = await run(running.engine, EngineRequest(f"same-{num_tokens}-{number}", prompt, 4))
        assert ended.last.num_cached_tokens == whole_blocks(running, prompt)
    context = [*prompt, *ended.token_ids]
    await until_cached(running, context, whole_blocks(running, context))
    assert await running.engine.reset_prefix_cache()
    await until_cached(running, context, 0)


async def test_cache_holds_the_blocks_of_sampled_tokens(running: Running) -> None:
    request = running.request("Tell me a long story.", max_tokens=100)
    ended = await run(running.engine, request)
    context = [*request.prompt_token_ids, *ended.token_ids, 65]
    await until_cached(running, context[:-1], whole_blocks(running, context[:-1]))
    expected = a_cache(running).num_cached_tokens(context)
    again = await run(running.engine, EngineRequest("continuation", context, 1))
    assert again.last.num_cached_tokens == expected


async def test_watcher_is_told_when_another_prompt_evicts_the_context(running: Running) -> None:
    cache = a_cache(running)
    assert await running.engine.reset_prefix_cache()
    prompt = running.engine.tokenizer.encode("my context is this " * 40, split_special=True)[:200]
    await run(running.engine, EngineRequest("watched", prompt, 1))
    await until_cached(running, prompt, whole_blocks(running, prompt))
    told: list[str] = []
    cache.on_evicted = told.append
    cache.watch("session", prompt)
    cache.watch("other", prompt)
    cache.unwatch("other")
    limit, size = running.capacity.max_model_len, running.capacity.block_size
    for number in range(running.capacity.kv_tokens // (limit - size) + 1):
        other = [100 + number, *prompt, *range(300, 300 + limit)][: limit - 1]
        await run(running.engine, EngineRequest(f"other-{number}", other, 1))

    async def is_told() -> bool:
        return bool(told) and cache.num_cached_tokens(prompt) == 0

    await until(is_told, MIRROR_S)
    assert set(told) == {"session"}
    cache.on_evicted = None
    again = await run(running.engine, EngineRequest("watched-again", prompt, 1))
    assert again.last.num_cached_tokens == 0


async def test_preemptions_are_counted_and_everyone_ends(running: Running) -> None:
    before = (await running.engine.stats()).num_preemptions
    seats, block = running.capacity.max_num_seqs, running.capacity.block_size
    size = running.capacity.kv_tokens // seats // block * block - 16
    words = running.engine.tokenizer.encode("word " * 1_024, split_special=True)
    requests = [
        EngineRequest(f"greedy-{n}", [65 + n, *words][:size], 100, json_schema=LONG_TEXT)
        for n in range(seats)
    ]
    ended = await asyncio.gather(*(run(running.engine, request) for request in requests))
    assert [len(end.token_ids) for end in ended] == [100] * seats
    assert (await running.engine.stats()).num_preemptions > before


async def test_running_engine_is_healthy(running: Running) -> None:
    await running.engine.check_health()
