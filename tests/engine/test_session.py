"""A session through the service on an engine: cached to the last block, exact after restarts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, cast

import pytest

from contracts.agent import Sampling
from contracts.llm_step import LLMStepInput, LLMStepResult
from contracts.message import ContextRef
from inference_service.engine.protocol import (
    ChatTokenizer,
    Engine,
    EngineOutput,
    EngineRequest,
)
from inference_service.scheduler.ready_cohort import ReadyCohort
from inference_service.service import InferenceService
from store.context import ContextStore
from store.database import Database
from store.step_ledger import StepLedger
from tests.engine.request import Running
from tests.engine.request import run as run_request
from tests.inference_service.harness import capacity_changed, step_input

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.parametrize(
        "running", ["simulated", pytest.param("vllm", marks=pytest.mark.vllm)], indirect=True
    ),
]

TURNS = 30
MIN_HIT = 0.95
QUESTIONS = ("Why?", "\u00e4?", "<|im_end|>", "Go.", "\U0001f30a?")


class Recorded:
    """An engine that remembers what it was asked."""

    def __init__(self, engine: Engine) -> None:
        self.requests: list[EngineRequest] = []
        self._engine = engine
        self.tokenizer = engine.tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        self.requests.append(request)
        return self._engine.generate(request)


def service_on(engine: Recorded, running: Running, database: Database) -> InferenceService:
    """Return a service without memory of earlier ones, as after a restart."""
    return InferenceService(
        engine=cast(Engine, engine),
        scheduler=ReadyCohort(capacity_changed(running.capacity)),
        ledger=StepLedger(database),
        contexts=ContextStore(database),
        replica="engine-0",
    )


def question(number: int, base: ContextRef | None) -> LLMStepInput:
    """Return a step of a few tokens; its answer is nearly always cut off."""
    text = QUESTIONS[number % len(QUESTIONS)]
    return step_input(number, base=base, text=text, sampling=Sampling(max_tokens=6))


async def take(service: InferenceService, step: LLMStepInput) -> LLMStepResult:
    """Take one step."""
    generation = await service.attach(step, b"test")
    return await generation.task


async def test_every_whole_block_of_a_session_is_found_cached(
    running: Running, database: Database
) -> None:
    await running.engine.reset_prefix_cache()
    service = service_on(Recorded(running.engine), running, database)
    size, known, attainable, cached, base = running.capacity.block_size, 0, 0, 0, None
    for number in range(TURNS):
        result = await take(service, question(number, base))
        usage, base = result.usage, result.context
        attainable += known // size * size
        cached += usage.cached_tokens
        # the last sampled token was never computed
        known = usage.prompt_tokens + usage.completion_tokens - 1
    service.close()
    assert known > 10 * size
    assert cached >= MIN_HIT * attainable, (cached, attainable)


async def test_a_restarted_service_sends_what_the_old_one_would_have_sent(
    running: Running, database: Database
) -> None:
    engine = Recorded(running.engine)
    service = service_on(engine, running, database)
    base: ContextRef | None = None
    for number in range(8):
        step = question(number, base)
        expected = (await service.sessions.resolve(step, {})).token_ids.tolist()
        service.close()
        service = service_on(engine, running, database)
        base = (await take(service, step)).context
        assert engine.requests[-1].prompt_token_ids == expected
    service.close()


class Forgetting:
    """The served model's template, but that it cuts each earlier answer down to its first half."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def render(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> str:
        last_user = max((n for n, m in enumerate(messages) if m["role"] == "user"), default=-1)
        cut = [
            {**m, "content": m["content"][: len(m["content"]) // 2]}
            if m["role"] == "assistant" and n < last_user
            else m
            for n, m in enumerate(messages)
        ]
        return self._tokenizer.render(cut, add_generation_prompt=add_generation_prompt)


async def test_a_history_that_the_template_rewrites_is_told_and_its_step_is_right(
    running: Running, database: Database
) -> None:
    """Case G13: the position is where the prompts part, and the answer is the new prompt's own."""
    await running.engine.reset_prefix_cache()
    engine, tokenizer = Recorded(running.engine), Forgetting(running.engine.tokenizer)
    engine.tokenizer = cast(ChatTokenizer, tokenizer)
    service = service_on(engine, running, database)
    sampling = Sampling(max_tokens=12)
    first = await take(service, step_input(0, text="Name the seas. " * 20, sampling=sampling))
    assert first.message is not None and len(first.message.content) > 2
    second = await take(
        service, step_input(1, base=first.context, text="And the lakes?", sampling=sampling)
    )
    assert service.sessions.divergences == 1
    service.close()
    before, after = (request.prompt_token_ids for request in engine.requests)
    rendered = tokenizer.render(
        [
            {"role": "user", "content": "Name the seas. " * 20},
            {"role": "assistant", "content": first.message.content},
            {"role": "user", "content": "And the lakes?"},
        ],
        add_generation_prompt=True,
    )
    assert after == running.engine.tokenizer.encode(rendered, split_special=False)
    assert second.diverged is not None
    position = second.diverged.position
    assert len(before) < position < second.diverged.base_length
    assert after[: len(before)] == before
    size = running.capacity.block_size
    assert second.usage.cached_tokens >= len(before) // size * size, "what is the same is cached"
    alone = await run_request(running.engine, running_request(after, sampling.max_tokens))
    assert second.message is not None
    assert second.message.content == running.engine.tokenizer.decode(alone.token_ids)


def running_request(prompt: Sequence[int], max_tokens: int) -> EngineRequest:
    """Return a request of these tokens that nobody's session goes on from."""
    return EngineRequest(
        request_id="g13-alone", prompt_token_ids=list(prompt), max_tokens=max_tokens
    )
