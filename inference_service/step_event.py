"""What the scheduler is told of a step that is ready."""

from __future__ import annotations

from datetime import UTC, datetime

from inference_service.generation import Generation
from inference_service.leaf import Leaf
from inference_service.scheduler.event import FanOut, StepReady


def step_ready(generation: Generation, leaf: Leaf, cached_tokens: int | None) -> StepReady:
    """Return the event; `cached_tokens` of the prompt are cached, None: nobody knows."""
    step, now = generation.step, generation.ready_s
    hints, deadline_s = step.hints, None
    if hints.deadline is not None:
        # The only use of the wall clock: a deadline comes from another process.
        deadline_s = now + (hints.deadline - datetime.now(UTC)).total_seconds()
    ttl = hints.speculative_ttl
    return StepReady(
        step_id=step.step_id,
        session=leaf.session,
        path=leaf.growing,
        max_tokens=step.sampling.max_tokens,
        is_new=step.is_first,
        cached_tokens=cached_tokens,
        job=step.job_id,
        tenant=hints.tenant,
        priority=hints.priority,
        attained_s=hints.attained_s,
        deadline_s=deadline_s,
        fan_out=FanOut(hints.fan_out.group, hints.fan_out.size) if hints.fan_out else None,
        is_speculative=ttl is not None,
        expires_s=None if ttl is None else now + ttl.total_seconds(),
    )
