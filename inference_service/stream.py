"""Tokens as they come: what the running LLM steps of one job have written so far.

A stream is made by looking: it costs nothing while nobody follows, holds no step back, and one that
begins late, or again, tells all from the step's beginning. A step may be sampled more than once
(a repair, a retry after a crash); each time is an *attempt* at its text, and a new one makes what
was told of the step before void. What a reader has of an answer at its `ended` is the text as it
was committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from datetime import timedelta

from contracts.llm_step import LLMStepResult
from inference_service.engine.protocol import ChatTokenizer
from inference_service.generation import Generation
from inference_service.prompt import draft_text
from inference_service.service import InferenceService

LOOK_EVERY = timedelta(seconds=0.1)


@dataclass(frozen=True, slots=True)
class Begun:
    """A new attempt at a step's text: what was told of the step before is void."""

    step_id: str
    attempt: str


@dataclass(frozen=True, slots=True)
class Written:
    """More of an attempt's text."""

    step_id: str
    attempt: str
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The step is over: `text` is its whole message, None if none was committed here.

    A message that calls tools says so in `tools`; its text is the call.
    """

    step_id: str
    text: str | None
    tools: tuple[str, ...] = ()


StreamEvent = Begun | Written | Ended


@dataclass(slots=True)
class _Told:
    attempt: str = ""
    text: str = ""


class JobStream:
    """Follows the steps of one job in one service, from now until it is closed."""

    def __init__(self, service: InferenceService, job_id: str) -> None:
        self._service = service
        self._tokenizer = service.engine.tokenizer
        self._job_id = job_id
        self._told: dict[str, _Told] = {}
        self._ends: list[Generation] = []
        service.on_end.add(self._note_end)

    def close(self) -> None:
        """Follow no more."""
        self._service.on_end.discard(self._note_end)

    async def events(self, every: timedelta = LOOK_EVERY) -> AsyncGenerator[StreamEvent, None]:
        """Yield what is new, for ever; nothing is kept for a reader who is slow."""
        while True:
            for event in self.look():
                yield event
            await asyncio.sleep(every.total_seconds())

    def look(self) -> list[StreamEvent]:
        """Return what is new since the last look."""
        events: list[StreamEvent] = []
        ends, self._ends = self._ends, []
        for generation in ends:
            events += self._news(generation)
            events.append(_end(generation))
            self._told.pop(generation.step_id, None)
        for generation in self._service.generations(self._job_id):
            events += self._news(generation)
        return events

    def _note_end(self, generation: Generation) -> None:
        if generation.step.job_id == self._job_id and generation.samples:
            self._ends.append(generation)

    def _news(self, generation: Generation) -> Iterable[StreamEvent]:
        if not generation.samples:
            return
        step_id, attempt = generation.step_id, generation.samples[-1]
        text = _draft(generation, self._tokenizer)
        told = self._told.setdefault(step_id, _Told())
        if attempt != told.attempt or not text.startswith(told.text):
            told.attempt, told.text = attempt, ""
            yield Begun(step_id, attempt)
        if len(text) > len(told.text):
            yield Written(step_id, attempt, text[len(told.text) :])
            told.text = text


def _draft(generation: Generation, tokenizer: ChatTokenizer) -> str:
    text = tokenizer.decode(generation.sampled.tolist())
    return draft_text(text, generation.step.output)


def _end(generation: Generation) -> Ended:
    task = generation.task
    if task.cancelled() or task.exception() is not None:
        return Ended(generation.step_id, None)
    result: LLMStepResult = task.result()
    if result.message is None:
        return Ended(generation.step_id, None)
    tools = tuple(call.tool for call in result.message.tool_calls)
    return Ended(generation.step_id, result.message.content, tools)
