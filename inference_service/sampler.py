"""One sample of a step: drives the engine, watches for silence, counts tokens."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from opentelemetry import trace

from contracts.agent import Sampling
from contracts.llm_step import FinishReason, StepPhase, Usage
from inference_service.dispatcher import Dispatcher
from inference_service.engine.protocol import Capability, Engine, EngineRequest, EngineTiming
from inference_service.failure import EngineStalledError
from inference_service.generation import Generation

OPERATION = "text_completion"
"""The span's name and `gen_ai.operation.name`, from OpenTelemetry's GenAI conventions."""

_TRACER = trace.get_tracer("muster.inference_service")


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished generation of the engine: sampled ids, why it ended, where its time went."""

    token_ids: array[int]
    finish_reason: FinishReason
    timing: EngineTiming


class Sampler:
    """Draws samples from the engine.

    `first_token_gap` bounds the wait from dispatch to the first token (the engine's own queue and
    prefill), `token_gap` the wait between pieces after that.
    """

    def __init__(
        self,
        engine: Engine,
        dispatcher: Dispatcher,
        *,
        first_token_gap: timedelta,
        token_gap: timedelta,
    ) -> None:
        self._engine = engine
        self._dispatcher = dispatcher
        self._first_token_gap_s = first_token_gap.total_seconds()
        self._token_gap_s = token_gap.total_seconds()

    async def sample(
        self,
        generation: Generation,
        prompt: array[int],
        sampling: Sampling,
        schema: dict[str, Any] | None,
        number: int,
    ) -> Sample:
        """Return the step's sample `number` (0 is the first try).

        Counts go to `generation.usage` as they come. Raises `EngineStalledError`,
        `EngineRequestError`, `EngineDeadError`.
        """
        request = EngineRequest(
            request_id=f"{generation.step_id}#{generation.epoch}.{number}",
            prompt_token_ids=prompt.tolist(),
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            json_schema=schema,
            priority=generation.step.hints.priority,
        )
        known = len(prompt) if number else generation.known_tokens
        step = generation.step
        with _TRACER.start_as_current_span(
            f"{OPERATION} {step.model}",
            attributes={
                "gen_ai.operation.name": OPERATION,
                "gen_ai.request.model": step.model,
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.conversation.id": step.job_id,
                "muster.step_id": step.step_id,
                "muster.cohort_size": generation.cohort_size,
            },
        ) as span:
            with self._accounted(generation, request, known):
                sample = await self._drain(generation, request)
            span.set_attributes(
                {
                    "gen_ai.usage.input_tokens": len(prompt),
                    "gen_ai.usage.output_tokens": len(sample.token_ids),
                    "gen_ai.response.finish_reasons": [sample.finish_reason.value],
                }
            )
            return sample

    @contextmanager
    def _accounted(
        self, generation: Generation, request: EngineRequest, num_known: int
    ) -> Iterator[None]:
        """Keep the GPU ledger's book of one request; what becomes of it is settled later."""
        gpu, now = self._dispatcher.gpu, self._dispatcher.now
        generation.samples.append(request.request_id)
        gpu.entered(
            request.request_id,
            num_prompt=len(request.prompt_token_ids),
            num_known=num_known,
            now=now(),
        )
        try:
            yield
        finally:
            gpu.ended(request.request_id, now())

    async def _drain(self, generation: Generation, request: EngineRequest) -> Sample:
        """Take the request's pieces to the last, within the gaps."""
        generation.phase = StepPhase.PREFILL
        token_ids = generation.sampled = array("i")
        before, gpu = generation.usage, self._dispatcher.gpu
        async with aclosing(self._engine.generate(request)) as pieces:
            while True:
                gap_s = self._token_gap_s if token_ids else self._first_token_gap_s
                try:
                    async with asyncio.timeout(gap_s):
                        piece = await anext(pieces)
                except TimeoutError:
                    raise EngineStalledError(
                        f"the engine gave no token for {gap_s:g} s "
                        f"({len(token_ids)} of at most {request.max_tokens} generated)"
                    ) from None
                self._dispatcher.engine_gave_output()
                is_first = bool(piece.token_ids) and not token_ids
                token_ids.extend(piece.token_ids)
                generation.usage = before + Usage(
                    prompt_tokens=len(request.prompt_token_ids),
                    cached_tokens=piece.num_cached_tokens,
                    completion_tokens=len(token_ids),
                )
                if is_first:
                    generation.phase = StepPhase.DECODE
                    at_once = Capability.CACHED_TOKENS_AT_ONCE in self._engine.capabilities
                    cached = piece.num_cached_tokens if at_once else None
                    gpu.first_token(request.request_id, self._dispatcher.now())
                    self._dispatcher.first_token(generation, cached)
                if piece.finish_reason is not None:
                    if Capability.CACHED_TOKENS in self._engine.capabilities:
                        gpu.cached(request.request_id, piece.num_cached_tokens)
                    if not before.prompt_tokens:
                        generation.late_cached_tokens = piece.num_cached_tokens
                    assert piece.timing is not None
                    return Sample(token_ids, piece.finish_reason, piece.timing)
