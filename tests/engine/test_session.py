"""A session through the service on an engine: cached to the last block, exact after restarts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from contracts.agent import Sampling
from contracts.llm_step import LLMStepInput, LLMStepResult
from contracts.message import ContextRef
from inference_service.engine.protocol import Engine, EngineOutput, EngineRequest
from inference_service.scheduler.ready_cohort import ReadyCohort
from inference_service.service import InferenceService
from store.context import ContextStore
from store.database import Database
from store.step_ledger import StepLedger
from tests.engine.request import Running
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
