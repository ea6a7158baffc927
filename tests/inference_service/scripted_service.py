"""A service whose scheduler does as a test says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from contracts.llm_step import LLMStepResult, OutputForm
from contracts.message import ContextRef
from inference_service.engine.protocol import EngineRequest
from inference_service.touch_request import TOUCH_PRIORITY
from store.database import Database
from tests.inference_service.harness import Harness, harness, step_input
from tests.inference_service.scripted import ScriptedScheduler

CALL = '{"tool": "search", "arguments": {}}'
FORM = OutputForm(tools=("search",), may_answer=True)


@asynccontextmanager
async def scripted(
    database: Database, *answers: str, **options: Any
) -> AsyncIterator[tuple[Harness, ScriptedScheduler]]:
    """Run a service whose scheduler is scripted; its n-th answer is the n-th of `answers`."""
    schedulers: list[ScriptedScheduler] = []

    def scheduler(capacity: Any) -> ScriptedScheduler:
        schedulers.append(ScriptedScheduler(capacity))
        return schedulers[0]

    left: Iterator[str] = iter(answers)

    def respond(request: EngineRequest, prompt: str) -> str:
        return next(left, "An answer.") if request.priority != TOUCH_PRIORITY else "x"

    async with harness(database, respond=respond, scheduler=scheduler, **options) as h:
        yield h, schedulers[0]


async def toolset(h: Harness) -> str:
    """Store a toolset of one tool and return its hash."""
    return await h.contexts.put_blob(
        [{"name": "search", "description": "Search.", "arguments": {"type": "object",
          "properties": {}, "required": [], "additionalProperties": False}}]
    )  # fmt: skip


async def acting(
    h: Harness, number: int = 0, *, base: ContextRef | None = None, **fields: Any
) -> LLMStepResult:
    """Take a step that is to end in a tool call."""
    fields = {"toolset": await toolset(h), "output": FORM, **fields}
    return await h.run(step_input(number, base=base, **fields))


async def decide(h: Harness, scheduler: ScriptedScheduler, *decisions: Any) -> None:
    """Let the scheduler decide this, at the next event."""
    scheduler.due += decisions
    h.service.dispatcher._schedule()
