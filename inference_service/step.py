"""The step protocol: claim, resolve, get ready, generate, validate, commit.

A generation is interrupted while it waits for the scheduler or is sampled, never during a claim or
a commit. What it has used is written to the ledger however it ends.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pydantic import TypeAdapter

from contracts.agent import Sampling, ToolSchema
from contracts.error import MusterError, UnavailableError
from contracts.limit import MAX_STEP_FAILURES
from contracts.llm_step import (
    FinishReason,
    LLMStepInput,
    LLMStepResult,
    Outcome,
    StepTiming,
    Usage,
)
from contracts.message import ContextRef, Message, node_hash
from inference_service.dispatcher import Dispatcher
from inference_service.engine.protocol import (
    Engine,
    EngineTiming,
)
from inference_service.failure import (
    DrainingError,
    NoProgressError,
    StaleAttemptError,
    StaleStepError,
    StepFailedTooOftenError,
    StepFaultError,
)
from inference_service.generation import Generation, InterruptedStepError, StopCause
from inference_service.prompt import InvalidOutputError, Toolset, output_schema, parse_output
from inference_service.sampler import Sampler
from inference_service.session import Prompt, Sessions
from store.context import ContextStore
from store.step_ledger import AlreadyFinished, AttemptOutcome, StepLedger, TokenRun

log = logging.getLogger(__name__)

_TOOLS = TypeAdapter(list[ToolSchema])
_MAX_TOOLSETS = 1_024
"""Toolsets kept in memory: each agent has one, however many jobs it has."""
_MAX_INLINE_CHARACTERS = 8_192


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Bounds of one step.

    `repairs`: samples drawn again, within one attempt, when the text is not the form asked for.
    `commit_patience`: how long a generated result waits for a database that is away.
    """

    first_token_gap: timedelta = timedelta(minutes=10)
    token_gap: timedelta = timedelta(seconds=60)
    repairs: int = 1
    repair_temperature: float = 0.7
    commit_patience: timedelta = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class _Answer:
    """A sample that is kept, as a message, with the engine time of all samples of the step."""

    message: Message
    token_ids: array[int]
    finish_reason: FinishReason
    timing: EngineTiming
    ended_s: float


class StepProtocol:
    """Runs generations. One object serves all steps of a service."""

    def __init__(
        self,
        *,
        engine: Engine,
        dispatcher: Dispatcher,
        ledger: StepLedger,
        contexts: ContextStore,
        sessions: Sessions,
        replica: str,
        settings: StepSettings,
    ) -> None:
        self._tokenizer = engine.tokenizer
        self._dispatcher = dispatcher
        self._ledger = ledger
        self._contexts = contexts
        self._sessions = sessions
        self._replica = replica
        self._settings = settings
        self._sampler = Sampler(
            engine,
            dispatcher,
            first_token_gap=settings.first_token_gap,
            token_gap=settings.token_gap,
        )
        self._toolsets: dict[str, Toolset] = {}

    async def run(self, generation: Generation, attempt: bytes) -> LLMStepResult:
        """Return the step's result; `attempt` is the task token of its first attempt.

        Raises one of our errors, each saying whether a retry may succeed.
        """
        claim = await self._ledger.claim(
            step=generation.step,
            digest=generation.digest,
            replica=self._replica,
            task_token=attempt,
        )
        if isinstance(claim, AlreadyFinished):
            return claim.result
        generation.claimed(claim.epoch, claim.failures, claim.past)
        is_kept = False
        try:
            result = await self._run_once(generation)
            is_kept = result.message is not None
        except MusterError as error:
            self._dispatcher.gave_up(generation, for_good=not error.retryable)
            raise
        finally:
            self._dispatcher.settle(generation, is_kept=is_kept)
        if result.message is None:
            self._dispatcher.gave_up(generation, for_good=True)
        else:
            self._dispatcher.committed(generation, result.message)
        return result

    async def _run_once(self, generation: Generation) -> LLMStepResult:
        try:
            return await self._run_claimed(generation)
        except InterruptedStepError:
            return await self._interrupted(generation)
        except UnavailableError as error:
            await self._close(generation, AttemptOutcome.ABANDONED, str(error))
            raise
        except Exception as error:
            failed = await self._failed(generation, error)
            if failed is error:
                raise
            raise failed from error

    async def _run_claimed(self, generation: Generation) -> LLMStepResult:
        step = generation.step
        toolset = await self._toolset(step.toolset)
        schema = output_schema(step.output, toolset)
        prompt = await self._sessions.resolve(step, toolset)
        with generation.interruptible():
            self._dispatcher.ready(generation, prompt)
            try:
                await generation.dispatched.wait()
                if generation.rejection:
                    raise generation.rejection
                answer = await self._answer(generation, prompt, toolset, schema)
            except BaseException:
                self._dispatcher.failed(generation)
                raise
            token_ids = self._context(prompt, answer)
            self._dispatcher.finished(generation, token_ids)
        return await self._commit(generation, prompt, answer, token_ids)

    def _context(self, prompt: Prompt, answer: _Answer) -> array[int]:
        """Return the ids of the whole context; an answer that was cut off gets its end of turn."""
        token_ids = prompt.token_ids + answer.token_ids
        if token_ids[-1] != self._tokenizer.eos_token_id:
            token_ids.append(self._tokenizer.eos_token_id)
        return token_ids

    async def _answer(
        self,
        generation: Generation,
        prompt: Prompt,
        toolset: Toolset,
        schema: dict[str, Any] | None,
    ) -> _Answer:
        """Sample until the text is the form asked for, at most `repairs` times again."""
        step = generation.step
        sampling = step.sampling
        spent = EngineTiming(0.0, 0.0, 0.0)
        for number in range(self._settings.repairs + 1):
            sample = await self._sampler.sample(
                generation, prompt.token_ids, sampling, schema, number
            )
            spent = _sum(spent, sample.timing)
            text = self._tokenizer.decode(sample.token_ids.tolist())
            try:
                message = await self._parsed(text, step, toolset)
            except InvalidOutputError as error:
                generation.usage = _wasted(generation.usage)
                log.info("step %s, sample %d: %s", step.step_id, number, error)
                if number == self._settings.repairs:
                    raise
                sampling = self._repaired(sampling, number)
            else:
                return _Answer(
                    message, sample.token_ids, sample.finish_reason, spent, self._dispatcher.now()
                )
        raise AssertionError("unreachable: the last repair returns or raises")

    async def _parsed(self, text: str, step: LLMStepInput, toolset: Toolset) -> Message:
        """Return the message of a text; a long one is read in a thread, off the event loop."""
        if len(text) <= _MAX_INLINE_CHARACTERS:
            return parse_output(text, step.step_id, step.output, toolset)
        return await asyncio.to_thread(parse_output, text, step.step_id, step.output, toolset)

    def _repaired(self, sampling: Sampling, number: int) -> Sampling:
        """Return other sampling: at temperature 0 the same text would come again."""
        return sampling.model_copy(
            update={
                "temperature": max(sampling.temperature, self._settings.repair_temperature),
                "seed": None if sampling.seed is None else sampling.seed + number + 1,
            }
        )

    async def _commit(
        self, generation: Generation, prompt: Prompt, answer: _Answer, token_ids: array[int]
    ) -> LLMStepResult:
        step = generation.step
        messages = (*step.append, answer.message)
        head = step.base.head if step.base else None
        for message in messages:
            head = node_hash(head, message)
        assert head is not None
        result = LLMStepResult(
            step_id=step.step_id,
            outcome=Outcome.FINISHED,
            context=ContextRef(head=head, token_run=step.step_id),
            message=answer.message,
            finish_reason=answer.finish_reason,
            usage=generation.past + generation.usage,
            timing=_timing(generation, answer, self._dispatcher.now()),
            replica=self._replica,
            epoch=generation.epoch,
            cohort_size=generation.cohort_size,
            diverged=prompt.diverged,
        )
        run = TokenRun(
            step_id=step.step_id,
            parent=prompt.parent,
            tokenizer=self._tokenizer.digest,
            token_ids=token_ids[prompt.base_length :],
        )
        if not await self._committed(result, parent=step.base, append=messages, run=run):
            raise StaleAttemptError(
                f"LLM step {step.step_id!r}: epoch {generation.epoch} was taken over by a later one"
            )
        self._sessions.keep(step.step_id, token_ids, parent=prompt.parent)
        timing = _timing(generation, answer, self._dispatcher.now())
        return result.model_copy(update={"timing": timing})

    async def _committed(
        self,
        result: LLMStepResult,
        *,
        parent: ContextRef | None,
        append: Sequence[Message],
        run: TokenRun,
    ) -> bool:
        """Commit, waiting for a database that is away: the tokens are paid for."""
        give_up_s = self._dispatcher.now() + self._settings.commit_patience.total_seconds()
        pause_s = 0.05
        while True:
            try:
                return await self._ledger.commit(
                    result,
                    parent=parent.head if parent else None,
                    append=append,
                    run=run,
                )
            except UnavailableError as error:
                if self._dispatcher.now() > give_up_s:
                    raise
                log.warning("step %s waits to be committed: %s", result.step_id, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 2.0)

    async def _interrupted(self, generation: Generation) -> LLMStepResult:
        """End a step that was told to stop: a cancelled one returns its usage, others raise."""
        generation.usage = _wasted(generation.usage)
        match generation.stop_cause:
            case StopCause.CANCELLED:
                await self._close(generation, AttemptOutcome.CANCELLED, "")
                return LLMStepResult(
                    step_id=generation.step_id,
                    outcome=Outcome.CANCELLED,
                    context=generation.step.base,
                    message=None,
                    finish_reason=FinishReason.ABORT,
                    usage=generation.past + generation.usage,
                    timing=generation.timing_so_far(self._dispatcher.now()),
                    replica=self._replica,
                    epoch=generation.epoch,
                    cohort_size=generation.cohort_size,
                )
            case StopCause.DRAINED:
                await self._close(generation, AttemptOutcome.HANDED_BACK, "")
                raise DrainingError(f"replica {self._replica!r} is draining")
            case StopCause.STALE:
                why = f"LLM step {generation.step_id!r}: the scheduler gave it up as stale"
                await self._close(generation, AttemptOutcome.ABANDONED, why)
                raise StaleStepError(why)
            case StopCause.STUCK:
                why = f"replica {self._replica!r} makes no progress and is started again"
                await self._close(generation, AttemptOutcome.ABANDONED, why)
                raise NoProgressError(why, hint="the step is retried; the replica's log says why")
            case _:
                await self._close(generation, AttemptOutcome.ABANDONED, "no attempt waits for it")
                raise StaleAttemptError(
                    f"LLM step {generation.step_id!r}: no attempt waits for it any more"
                )

    async def _failed(self, generation: Generation, error: Exception) -> MusterError:
        """Record a failure, foreseen or not, and return what to raise: the limit counts both."""
        if not isinstance(error, MusterError):
            log.error("step %s: a fault of the service", generation.step_id, exc_info=error)
            error = StepFaultError(
                f"LLM step {generation.step_id!r}: {type(error).__name__}: {error}",
                hint="this is a bug; its traceback stands in the inference service's log",
            )
        await self._close(generation, AttemptOutcome.FAILED, str(error))
        failures = generation.failures + 1
        if not error.retryable or failures < MAX_STEP_FAILURES:
            return error
        return StepFailedTooOftenError(
            f"LLM step {generation.step_id!r} failed {failures} times, the limit is "
            f"{MAX_STEP_FAILURES}; the last time: {error.message}",
            hint=error.hint,
        )

    async def _close(self, generation: Generation, outcome: AttemptOutcome, error: str) -> None:
        try:
            await self._ledger.close_attempt(
                generation.step_id, generation.epoch, outcome, _wasted(generation.usage), error
            )
        except UnavailableError as away:
            log.warning("step %s: its end is not in the ledger: %s", generation.step_id, away)

    async def _toolset(self, digest: str | None) -> Toolset:
        if digest is None:
            return {}
        if digest not in self._toolsets:
            tools = _TOOLS.validate_python(await self._contexts.get_blob(digest))
            if len(self._toolsets) >= _MAX_TOOLSETS:
                self._toolsets.clear()
            self._toolsets[digest] = {tool.name: tool for tool in tools}
        return self._toolsets[digest]


def _wasted(usage: Usage) -> Usage:
    """Return the usage with all its generated tokens counted as waste."""
    return usage.model_copy(update={"wasted_tokens": usage.completion_tokens})


def _sum(a: EngineTiming, b: EngineTiming) -> EngineTiming:
    return EngineTiming(a.queue_s + b.queue_s, a.prefill_s + b.prefill_s, a.decode_s + b.decode_s)


def _timing(generation: Generation, answer: _Answer, now: float) -> StepTiming:
    """Split the time from the step's start to `now`; what no part claims is the engine's queue."""
    engine_s = answer.ended_s - generation.dispatched_s
    prefill_s = min(answer.timing.prefill_s, engine_s)
    decode_s = min(answer.timing.decode_s, engine_s - prefill_s)
    return StepTiming(
        host_pre_s=generation.ready_s - generation.created_s,
        ready_wait_s=generation.dispatched_s - generation.ready_s,
        engine_queue_s=engine_s - prefill_s - decode_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        host_post_s=now - answer.ended_s,
    )
