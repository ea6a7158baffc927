"""A service on a simulated engine and a real database, and steps to give it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from contracts.llm_step import LLMStepInput, LLMStepResult
from contracts.message import ContextRef, Message, Role
from inference_service.engine.protocol import ChatTokenizer, EngineCapacity, EngineRequest
from inference_service.engine.simulated import SimulatedConfig, SimulatedEngine
from inference_service.generation import Generation, StopCause
from inference_service.scheduler.event import CapacityChanged
from inference_service.scheduler.protocol import Scheduler
from inference_service.scheduler.ready_cohort import ReadyCohort
from inference_service.service import InferenceService
from inference_service.step import StepSettings
from store.context import ContextStore
from store.database import Database
from store.step_ledger import StepLedger

_tokens = itertools.count()


@dataclass
class Harness:
    """One service and what its engine was asked."""

    service: InferenceService
    engine: SimulatedEngine
    ledger: StepLedger
    contexts: ContextStore
    requests: list[EngineRequest] = field(default_factory=list)

    async def attach(self, step: LLMStepInput) -> tuple[Generation, bytes]:
        """Attach a new attempt."""
        attempt = f"attempt-{next(_tokens)}".encode()
        return await self.service.attach(step, attempt), attempt

    async def run(self, step: LLMStepInput) -> LLMStepResult:
        """Attach and wait for the result."""
        generation, _ = await self.attach(step)
        return await generation.task

    async def stop(self, generation: Generation, attempt: bytes, cause: StopCause) -> LLMStepResult:
        """Detach for a cause and wait for the generation's end."""
        self.service.detach(generation, attempt, cause)
        return await generation.task


@asynccontextmanager
async def harness(
    database: Database,
    *,
    replica: str = "engine-0",
    config: SimulatedConfig | None = None,
    respond: Callable[[EngineRequest, str], str] | None = None,
    settings: StepSettings | None = None,
    scheduler: Callable[[CapacityChanged], Scheduler] = ReadyCohort,
    tokenizer: ChatTokenizer | None = None,
) -> AsyncIterator[Harness]:
    """Run a service; its engine answers with `respond`, and is empty again at the end."""
    requests: list[EngineRequest] = []

    def answer(request: EngineRequest, prompt: str) -> str:
        requests.append(request)
        return respond(request, prompt) if respond else "An answer."

    engine = SimulatedEngine(config or SimulatedConfig(time_scale=0.0), answer, tokenizer)
    capacity = await engine.start()
    ledger, contexts = StepLedger(database), ContextStore(database)
    service = InferenceService(
        engine=engine,
        scheduler=scheduler(capacity_changed(capacity)),
        ledger=ledger,
        contexts=contexts,
        replica=replica,
        settings=settings,
    )
    try:
        yield Harness(service, engine, ledger, contexts, requests)
    finally:
        service.close()
        await engine.close()


def capacity_changed(capacity: EngineCapacity) -> CapacityChanged:
    """Return what a scheduler is told of an engine."""
    return CapacityChanged(
        max_num_seqs=capacity.max_num_seqs,
        num_blocks=capacity.kv_tokens // capacity.block_size,
        block_size=capacity.block_size,
        max_model_len=capacity.max_model_len,
        prefill_tokens=4_096,
    )


def step_input(
    number: int = 0,
    *,
    job_id: str = "job-a",
    base: ContextRef | None = None,
    text: str = "Hello?",
    **fields: object,
) -> LLMStepInput:
    """Return the input of step `number` of a job."""
    return LLMStepInput.model_validate(
        {
            "step_id": f"{job_id}/branch/{number}",
            "job_id": job_id,
            "model": "simulated",
            "base": base,
            "append": (Message(role=Role.USER, content=text),),
            **fields,
        }
    )


async def until(condition: Callable[[], Awaitable[bool] | bool], timeout_s: float = 10.0) -> None:
    """Wait until a condition holds; fail loudly if it never does."""
    async with asyncio.timeout(timeout_s):
        while True:
            holds = condition()
            if holds if isinstance(holds, bool) else await holds:
                return
            await asyncio.sleep(0.005)
