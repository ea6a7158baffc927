"""Random lives of many jobs under KV pressure: the scheduler is told nothing that cannot be so."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from contracts.error import MusterError
from contracts.llm_step import LLMStepResult, Outcome, OutputForm, SessionHint, SessionState
from contracts.message import ContextRef, Message, Role
from inference_service.engine.protocol import EngineRequest
from inference_service.engine.simulated import SimulatedConfig
from inference_service.generation import StopCause
from store.database import Database
from tests.inference_service.harness import Harness, harness, step_input, until

CALL = '{"tool": "search", "arguments": {}}'
CONFIG = SimulatedConfig(time_scale=0.02, num_blocks=96, max_model_len=3_072, max_num_seqs=4)
NUM_JOBS = 40
MAX_STEPS = 4


@dataclass
class Crowd:
    """Jobs that go on, wait, fork, are cancelled or abandoned, all by one seed."""

    h: Harness
    random: random.Random
    opening: ContextRef
    tools: str
    finished: int = 0
    ends: list[str] = field(default_factory=list)

    async def live(self, job: str) -> None:
        """Take steps until an end of one kind or another."""
        base = self.opening
        for number in range(MAX_STEPS):
            is_last = number == MAX_STEPS - 1
            fate = self.random.random()
            result = await self.step(job, number, base, fate, is_last=is_last)
            if result is None or is_last:
                self.ends.append("stopped" if result is None else "answered")
                return
            assert result.context is not None
            base = result.context
            await asyncio.sleep(self.random.choice((0.0, 0.01, 0.05)))
            if self.random.random() < 0.2:
                waits = self.random.random() < 0.5
                state = SessionState.WAITING if waits else SessionState.ENDED
                self.h.service.hint(SessionHint(job_id=job, state=state))
            if self.random.random() < 0.2:
                await self.step(job, 100 + number, base, 1.0, is_last=True)

    async def step(
        self, job: str, number: int, base: ContextRef, fate: float, *, is_last: bool
    ) -> LLMStepResult | None:
        """Take one step; None if it was cancelled, which a small `fate` says."""
        step = step_input(
            number,
            job_id=job,
            base=base,
            text="word " * self.random.randrange(10, 120),
            toolset=None if is_last else self.tools,
            output=OutputForm() if is_last else OutputForm(tools=("search",)),
        )
        generation, attempt = await self.h.attach(step)
        while fate < 0.3:
            await asyncio.wait({generation.task}, timeout=self.random.choice((0.0, 0.02, 0.2)))
            cause = StopCause.CANCELLED if fate < 0.1 else StopCause.ABANDONED
            self.h.service.detach(generation, attempt, cause)
            if cause is StopCause.CANCELLED:
                break
            fate = 1.0
            await asyncio.wait({generation.task})
            generation, attempt = await self.h.attach(step)
        try:
            result = await generation.task
        except MusterError:
            return None
        self.finished += result.outcome is Outcome.FINISHED
        return result if result.outcome is Outcome.FINISHED else None


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_random_lives_leave_nothing_behind(database: Database, seed: int) -> None:
    def respond(request: EngineRequest, prompt: str) -> str:
        return CALL if request.json_schema else "An answer."

    async with harness(database, config=CONFIG, respond=respond) as h:
        head = await h.contexts.put(None, [Message(role=Role.SYSTEM, content="Be brief. " * 20)])
        tools = await h.contexts.put_blob(
            [{"name": "search", "description": "Search.", "arguments": {"type": "object",
              "properties": {}, "required": [], "additionalProperties": False}}]
        )  # fmt: skip
        crowd = Crowd(h, random.Random(seed), ContextRef(head=head), tools)
        jobs = [f"job-{number}" for number in range(NUM_JOBS)]
        async with asyncio.timeout(60):
            await asyncio.gather(*map(crowd.live, jobs))
        for job in jobs:
            h.service.hint(SessionHint(job_id=job, state=SessionState.ENDED))
        await until(lambda: len(h.service.dispatcher.touches) == 0)
        dispatcher = h.service.dispatcher
        assert crowd.finished > NUM_JOBS, crowd.ends
        assert len(set(crowd.ends)) == 2
        assert dispatcher.tally.refused_events == 0
        assert dispatcher.counts() == (0, 0)
        assert dispatcher.num_sessions == 0
        view = dispatcher.view()
        assert (view.acting, view.admitted, view.working_set) == (0, 0, 0)
        await until(lambda: _is_idle(h))
        h.engine.check_integrity()


async def _is_idle(h: Harness) -> bool:
    stats = await h.engine.stats()
    return stats.num_running == stats.num_waiting == 0
