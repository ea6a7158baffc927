"""What the engine has cached of waiting sessions, and what it evicts of them, is told."""

from __future__ import annotations

from inference_service.engine.protocol import EngineRequest
from inference_service.engine.simulated import SimulatedConfig
from inference_service.scheduler.event import KVEvicted, StepFinished, StepReady
from store.database import Database
from tests.inference_service.harness import step_input, until
from tests.inference_service.scripted_service import CALL, acting, decide, scripted


async def test_what_is_cached_of_a_prompt_and_what_is_evicted_of_a_session_is_told(
    database: Database,
) -> None:
    config = SimulatedConfig(time_scale=0.0, num_blocks=32, max_model_len=1_024)
    async with scripted(database, CALL, config=config) as (h, scheduler):
        first = await acting(h, 0, text="x" * 400)
        await h.run(step_input(0, job_id="job-b", text="y" * 700))
        await until(lambda: bool(scheduler.told(KVEvicted)))
        evicted = scheduler.told(KVEvicted)[-1]
        assert evicted.session == step_input(0).step_id
        assert evicted.cached_tokens < scheduler.told(StepFinished)[0].leaf.end
        await h.run(step_input(1, base=first.context))
        new, _, back = scheduler.told(StepReady)
        assert new.cached_tokens == 0
        assert back.cached_tokens == evicted.cached_tokens


async def test_what_is_evicted_of_a_session_is_told_while_its_step_is_in_line(
    database: Database,
) -> None:
    config = SimulatedConfig(time_scale=0.0, num_blocks=32, max_model_len=1_024)
    async with scripted(database, CALL, config=config) as (h, scheduler):
        first = await acting(h, 0, text="x" * 400)
        scheduler.holds = True
        waiting, _ = await h.attach(step_input(1, base=first.context))
        await until(lambda: len(scheduler.told(StepReady)) == 2)
        told = scheduler.told(StepReady)[-1].cached_tokens
        assert told and not scheduler.told(KVEvicted)
        prompt = list(range(1_000, 1_700))
        async for _ in h.engine.generate(EngineRequest("other", prompt, max_tokens=1)):
            pass
        await until(lambda: bool(scheduler.told(KVEvicted)))
        evicted = scheduler.told(KVEvicted)[-1]
        assert evicted.session == step_input(0).step_id
        assert evicted.cached_tokens < told
        scheduler.holds = False
        await decide(h, scheduler)
        await waiting.task
        num_told = len(scheduler.told(KVEvicted))
        async for _ in h.engine.generate(EngineRequest("again", prompt[::-1], max_tokens=1)):
            pass
        await decide(h, scheduler)
        assert len(scheduler.told(KVEvicted)) == num_told, "it has ended"
