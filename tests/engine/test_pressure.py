"""The scheduler over engines whose cache is too small for all: cases G7, G10 and G11."""

from __future__ import annotations

import pytest

from bench.live import LiveLoop
from bench.policy import named_policy
from bench.world.metric import Metrics
from bench.world.plan import NEVER_S, SessionPlan, StepPlan
from inference_service.engine.protocol import Capability
from inference_service.engine.simulated import SimulatedEngine
from inference_service.scheduler.event import CapacityChanged
from tests.engine.request import Running

LIMIT_S = 200.0


async def run(running: Running, plans: list[SessionPlan], policy: str = "muster") -> Metrics:
    """Let a policy run sessions over the engine, whose cache is empty before and after."""
    if Capability.CACHED_TOKENS not in running.engine.capabilities or running.engine.cache is None:
        pytest.skip("this engine does not tell what its prefix cache holds")
    told = running.capacity
    capacity = CapacityChanged(
        max_num_seqs=told.max_num_seqs,
        num_blocks=told.kv_tokens // told.block_size - 1,
        block_size=told.block_size,
        max_model_len=told.max_model_len,
        prefill_tokens=2 * told.max_num_batched_tokens,
    )
    assert await running.engine.reset_prefix_cache()
    is_simulated = isinstance(running.engine, SimulatedEngine)
    loop = LiveLoop(
        plans,
        named_policy(policy),
        running.engine,
        capacity,
        vocabulary=range(ord("a"), ord("z")) if is_simulated else range(1_000, 40_000),
    )
    metrics = await loop.run(LIMIT_S)
    assert not metrics.stalled
    return metrics


async def test_more_sessions_than_fit_keep_their_cache(running: Running) -> None:
    """Case G7: three times more than fit are not preempted, and compute little again."""
    steps = (StepPlan(250, 60, "tool", 0.2), StepPlan(250, 60))
    final_blocks = 620 // running.capacity.block_size
    count = 3 * running.capacity.kv_tokens // running.capacity.block_size // final_blocks
    plans = [SessionPlan(f"s{number}", steps) for number in range(count)]
    metrics = await run(running, plans)
    assert (metrics.steps, metrics.preemptions) == (2 * count, 0)
    plain = await run(running, plans, "plain")
    assert metrics.recompute_share < 0.5 * plain.recompute_share


async def test_leases_that_hold_the_cache_give_way_to_a_new_session(running: Running) -> None:
    """Case G10: sessions whose tools never return hold all of it; new ones end all the same."""
    hangs = (StepPlan(620, 8, "hangs", NEVER_S), StepPlan(8, 8))
    plans = [SessionPlan(f"h{number}", hangs) for number in range(3)]
    plans += [SessionPlan(f"n{number}", (StepPlan(900, 8),), arrival_s=1.0) for number in range(2)]
    metrics = await run(running, plans)
    assert metrics.sessions == 2
    assert metrics.steps == 3 + 2


async def test_prefix_that_a_cohort_shares_is_computed_once(running: Running) -> None:
    """Case G11: sixteen prompts, nine tenths of each the same."""
    shared, own = 448, 50
    step = StepPlan(shared + own, 4)
    plans = [SessionPlan(f"s{number}", (step,), shared_tokens=shared) for number in range(16)]
    metrics = await run(running, plans)
    assert metrics.steps == 16
    assert metrics.prefix_hit == pytest.approx(15 * shared / (16 * (shared + own)))
