"""The GPU ledger in the service: what the engine did for steps comes to the right account."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from contracts.llm_step import OutputForm
from inference_service.engine.protocol import EngineRequest
from inference_service.engine.simulated import SimulatedConfig
from inference_service.generation import StopCause
from inference_service.gpu_ledger import GPUAccount
from inference_service.prompt import InvalidOutputError
from store.database import Database
from tests.inference_service.harness import Harness, harness, step_input, until

TIMED = SimulatedConfig(time_scale=1.0)
FORM = OutputForm(json_schema={"type": "object"})


def account(h: Harness) -> GPUAccount:
    found = h.service.dispatcher.gpu.account(h.service.dispatcher.now())
    assert sum(astuple(found)[1:]) == pytest.approx(found.wall_s, rel=1e-6)
    return found


async def test_a_finished_step_is_useful_and_nothing_of_it_is_left_pending(
    database: Database,
) -> None:
    async with harness(database, config=TIMED) as h:
        await h.run(step_input())
        found, later = account(h), account(h)
    assert found.useful_prefill_s > 0
    assert found.useful_decode_s > 0
    assert (found.waste_s, found.recompute_s, found.pending_s) == (0.0, 0.0, 0.0)
    assert later.idle_s >= found.idle_s


async def test_a_context_that_was_evicted_is_recomputed(database: Database) -> None:
    async with harness(database, config=TIMED) as h:
        first = await h.run(step_input(text="word " * 400))
        assert account(h).recompute_s == 0
        assert await h.engine.reset_prefix_cache()
        await h.run(step_input(1, base=first.context, text="And?"))
        found = account(h)
    assert found.recompute_s > found.useful_prefill_s / 4


async def test_samples_that_are_not_the_form_asked_for_are_waste(database: Database) -> None:
    def never(request: EngineRequest, prompt: str) -> str:
        return "{cut"

    async with harness(database, config=TIMED, respond=never) as h:
        with pytest.raises(InvalidOutputError):
            await h.run(step_input(output=FORM))
        found = account(h)
    assert found.waste_s > 0
    assert (found.useful_prefill_s, found.useful_decode_s, found.pending_s) == (0.0, 0.0, 0.0)


async def test_a_cancelled_step_is_waste(database: Database) -> None:
    async with harness(database, config=TIMED, respond=lambda *_: "word " * 200) as h:
        generation, attempt = await h.attach(step_input())
        await until(lambda: generation.usage.completion_tokens > 3)
        await h.stop(generation, attempt, StopCause.CANCELLED)
        found = account(h)
    assert found.waste_s > 0
    assert found.useful_decode_s == 0
