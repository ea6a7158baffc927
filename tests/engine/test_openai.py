"""What an OpenAI-compatible server may lack, and how it may fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from contracts.error import BadInputError, MusterError, UnavailableError
from contracts.llm_step import FinishReason
from inference_service.engine.openai import OpenAIEngine
from inference_service.engine.openai_wire import (
    OpenAIConfig,
    cache_from_metrics,
    load_from_metrics,
    served_models,
)
from inference_service.engine.protocol import (
    Capability,
    EngineDeadError,
    EngineRequest,
    EngineRequestError,
)
from inference_service.engine.tokenizer import TransformersTokenizer
from inference_service.model import ModelFiles
from muster.settings import load_settings
from muster.stack.port import free_port
from muster.worker.inference import openai_config
from tests.engine.completion_server import EXTENSIONS, MODEL, PLAIN, CompletionServer
from tests.engine.request import run
from tests.engine.test_tokenizer import load

# The model may have to be converted first; importing transformers takes seconds.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WITHIN_S = 10.0

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="small"} 2.0
vllm:num_requests_waiting{engine="0",model_name="small"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="small"} 0.25
vllm:num_preemptions_total{engine="0",model_name="small"} 4.0
vllm:cache_config_info{block_size="32",num_gpu_blocks="71",kv_cache_size_tokens="None"} 1.0
"""


@pytest.fixture(scope="module")
def tokenizer(model_files: ModelFiles) -> TransformersTokenizer:
    return load(model_files.path)


@asynccontextmanager
async def started(
    server: CompletionServer, model_files: ModelFiles, **options: Any
) -> AsyncIterator[OpenAIEngine]:
    """Yield an engine on a server that is up for as long."""
    async with server.serve() as url:
        engine = OpenAIEngine(
            OpenAIConfig(url, model_files.path, **{"kv_tokens": 4_096, **options})
        )
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()


def request(**options: Any) -> EngineRequest:
    """Return a request of a few ids."""
    return EngineRequest("r", [9_000, 9_001, 9_002], 16, **options)


async def test_richest_dialect_that_the_server_takes_is_spoken(
    tokenizer: TransformersTokenizer, model_files: ModelFiles
) -> None:
    expected = {
        frozenset({"priority", *EXTENSIONS}): {Capability.PRIORITY, Capability.EXACT_TOKEN_IDS},
        frozenset(EXTENSIONS): {Capability.EXACT_TOKEN_IDS},
        frozenset[str](): set[Capability](),
    }
    for known, capabilities in expected.items():
        server = CompletionServer(tokenizer, known=PLAIN | known)
        async with started(server, model_files) as engine:
            assert engine.capabilities == capabilities | {Capability.CACHED_TOKENS}
            ended = await run(engine, request(priority=3, seed=5, temperature=0.5))
        assert tokenizer.decode(ended.token_ids) == server.answer
        assert ended.last.finish_reason is FinishReason.STOP
        assert ended.last.num_cached_tokens == 7
        assert server.bodies[-1]["seed"] == 5
        assert server.bodies[-1].get("priority") == (3 if "priority" in known else None)


async def test_text_without_ids_ends_with_the_end_of_turn(
    tokenizer: TransformersTokenizer, model_files: ModelFiles
) -> None:
    async with started(CompletionServer(tokenizer), model_files) as engine:
        ended = await run(engine, request())
    assert ended.token_ids[-1] == tokenizer.eos_token_id
    assert Capability.EXACT_TOKEN_IDS not in engine.capabilities


async def test_server_that_takes_text_only_gets_the_prompt_with_its_control_tokens(
    tokenizer: TransformersTokenizer, model_files: ModelFiles
) -> None:
    server = CompletionServer(tokenizer, takes_ids=False)
    turns = [{"role": "user", "content": "Grüße!"}]
    prompt = tokenizer.render(turns, add_generation_prompt=True)
    async with started(server, model_files) as engine:
        ids = tokenizer.encode(prompt, split_special=False)
        await run(engine, EngineRequest("text", ids, 4))
        assert server.bodies[-1]["prompt"] == prompt
        ids += tokenizer.encode("I say <|im_end|> now", split_special=True)
        with pytest.raises(EngineRequestError, match="looks like a control token"):
            await run(engine, EngineRequest("forged", ids, 4))


async def test_model_is_the_only_one_or_the_one_asked_for(
    tokenizer: TransformersTokenizer, model_files: ModelFiles
) -> None:
    server = CompletionServer(tokenizer, models=[{**MODEL, "id": "a"}, {**MODEL, "id": "b"}])
    with pytest.raises(BadInputError, match=r"serves 'a', 'b'"):
        async with started(server, model_files):
            pass
    with pytest.raises(BadInputError, match=r"serves 'a', 'b', not 'c'"):
        async with started(server, model_files, model="c"):
            pass
    async with started(server, model_files, model="b") as engine:
        await run(engine, request())
    assert server.bodies[-1]["model"] == "b"


async def test_sizes_come_from_the_server_or_from_settings_and_one_must_tell(
    tokenizer: TransformersTokenizer, model_files: ModelFiles
) -> None:
    untold = CompletionServer(tokenizer, models=[{"id": "small"}])
    with pytest.raises(BadInputError, match="context window"):
        async with started(untold, model_files):
            pass
    with pytest.raises(BadInputError, match="KV cache"):
        async with started(CompletionServer(tokenizer), model_files, kv_tokens=None):
            pass
    async with started(untold, model_files, max_model_len=300) as engine:
        capacity = await engine.start()
        assert (capacity.max_model_len, capacity.kv_tokens, capacity.block_size) == (300, 4_096, 16)
    told = CompletionServer(tokenizer, metrics=METRICS)
    async with started(told, model_files, max_model_len=1_000, kv_tokens=None) as engine:
        capacity = await engine.start()
        assert (capacity.max_model_len, capacity.kv_tokens, capacity.block_size) == (512, 2_240, 32)
        assert engine.blocks(33) == 2


def test_load_and_cache_are_read_from_metrics() -> None:
    load = load_from_metrics(METRICS)
    assert load is not None
    assert (load.num_running, load.num_waiting) == (2, 3)
    assert (load.kv_cache_usage, load.num_preemptions) == (0.25, 4)
    assert cache_from_metrics(METRICS) == (2_240, 32)
    assert load_from_metrics("http_requests 3.0\n") is None
    assert cache_from_metrics("") is None


async def test_load_without_metrics_is_that_of_our_own_requests(
    tokenizer: TransformersTokenizer, model_files: ModelFiles
) -> None:
    server = CompletionServer(tokenizer)
    async with started(server, model_files) as engine:
        server.failure = "silent"
        async with aclosing(engine.generate(request())) as outputs:
            await anext(outputs)
            assert (await engine.stats()).num_running == 1
        assert (await engine.stats()).num_running == 0
        await asyncio.wait_for(server.aborted.wait(), WITHIN_S)


@pytest.mark.parametrize(
    ("failure", "error", "words"),
    [
        (400, EngineRequestError, "no luck"),
        (401, BadInputError, "API key"),
        (404, BadInputError, "knows nothing"),
        (429, UnavailableError, "no more requests"),
        (500, UnavailableError, "no luck"),
        ("early", UnavailableError, "ended its answer early"),
        ("told", UnavailableError, "out of memory"),
        ("garbage", UnavailableError, "no JSON"),
    ],
)
async def test_failure_of_one_request_is_told_as_what_it_is(
    failure: int | str,
    error: type[MusterError],
    words: str,
    tokenizer: TransformersTokenizer,
    model_files: ModelFiles,
) -> None:
    server = CompletionServer(tokenizer)
    async with started(server, model_files) as engine:
        server.failure = failure
        with pytest.raises(error, match=words) as caught:
            await run(engine, request())
        assert caught.value.hint
        server.failure = 0
        await run(engine, request())
        await engine.check_health()


async def test_server_that_is_away_is_dead_until_it_is_back(
    tokenizer: TransformersTokenizer, model_files: ModelFiles
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineDeadError, match="no server answers"):
        await OpenAIEngine(OpenAIConfig(url, model_files.path)).start()
    server = CompletionServer(tokenizer)
    async with server.serve() as url:
        engine = OpenAIEngine(OpenAIConfig(url, model_files.path, kv_tokens=4_096))
        await engine.start()
        server.failure = "silent"
        outputs = engine.generate(request())
        await anext(outputs)
    with pytest.raises(EngineDeadError):
        async for _ in outputs:
            pass
    with pytest.raises(EngineDeadError):
        await run(engine, request())
    with pytest.raises(EngineDeadError):
        await engine.check_health()
    await engine.close()


async def test_closing_ends_requests_in_flight_with_an_error(
    tokenizer: TransformersTokenizer, model_files: ModelFiles
) -> None:
    server = CompletionServer(tokenizer)
    async with started(server, model_files) as engine:
        server.failure = "silent"
        running = asyncio.create_task(run(engine, request()))
        while len(server.bodies) < 3 or (await engine.stats()).num_running == 0:
            await asyncio.sleep(0.005)
        await engine.close()
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(running, WITHIN_S)


async def test_settings_lead_to_the_server(
    tokenizer: TransformersTokenizer, model_files: ModelFiles
) -> None:
    server = CompletionServer(tokenizer, api_key="secret")
    async with server.serve() as url:
        settings = load_settings(
            engine="openai",
            openai_url=url,
            openai_api_key="secret",
            openai_kv_tokens=4_096,
            max_num_seqs=5,
        )
        engine = OpenAIEngine(openai_config(settings, model_files.path))
        capacity = await engine.start()
        assert (capacity.max_num_seqs, capacity.max_model_len, capacity.kv_tokens) == (
            5,
            512,
            4_096,
        )
        await engine.close()


async def test_wrong_tokenizer_key_or_schema_is_found_at_start(
    tokenizer: TransformersTokenizer, model_files: ModelFiles
) -> None:
    class Other(CompletionServer):
        def _usage(self, body: dict[str, Any]) -> dict[str, Any]:
            return {"prompt_tokens": 3}

    loose = CompletionServer(tokenizer, schema_answer="Sure! {}")
    strict = CompletionServer(tokenizer, known=PLAIN - {"response_format"})
    keyed = CompletionServer(tokenizer, api_key="secret")
    for server, words in (
        (Other(tokenizer), "is not that of the model"),
        (loose, "Sure!"),
        (strict, "JSON schema"),
        (keyed, "API key"),
    ):
        with pytest.raises(BadInputError, match=words):
            async with started(server, model_files):
                pass
    async with started(keyed, model_files, api_key="secret") as engine:
        assert "secret" not in repr(replace(engine.config))


async def test_what_is_no_such_server_is_refused(
    tokenizer: TransformersTokenizer, model_files: ModelFiles
) -> None:
    deaf = CompletionServer(tokenizer, known=set())
    with pytest.raises(BadInputError, match="takes no completions"):
        async with started(deaf, model_files):
            pass
    async with CompletionServer(tokenizer).serve() as url:
        assert await served_models(url, "", WITHIN_S) == ["small"]
        with pytest.raises(BadInputError, match="knows nothing"):
            await OpenAIEngine(OpenAIConfig(url + "/elsewhere", model_files.path)).start()
