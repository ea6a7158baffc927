"""What vLLM says, in the words of the engine protocol."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from contracts.error import UnavailableError
from contracts.llm_step import FinishReason
from inference_service.engine.protocol import (
    EngineCapacity,
    EngineOutput,
    EngineStepStats,
    EngineTiming,
)

FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "repetition": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


class LatestLoad:
    """A stat logger of vLLM that keeps the scheduler's last word and writes nothing.

    `num_preemptions` adds up what each engine step tells. `on_step` hears of each; where vLLM
    schedules the next one during it (`runs_ahead`), what it measures is not what the device took.
    """

    def __init__(self, on_step: Callable[[EngineStepStats], object]) -> None:
        self.on_step = on_step
        self.runs_ahead = False
        self.num_running = 0
        self.num_waiting = 0
        self.kv_cache_usage = 0.0
        self.num_preemptions = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        """Take over a snapshot; engine steps without one change nothing."""
        if scheduler_stats is not None:
            self.num_running = scheduler_stats.num_running_reqs
            self.num_waiting = (
                scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            )
            self.kv_cache_usage = scheduler_stats.kv_cache_usage
            self._tell(scheduler_stats.iteration_details)
        if iteration_stats is not None:
            self.num_preemptions += iteration_stats.num_preempted_reqs

    def _tell(self, details: Any) -> None:
        if details is not None and not details.is_dummy:
            self.on_step(
                EngineStepStats(
                    duration_s=math.inf if self.runs_ahead else details.elapsed_ms / 1_000,
                    prefill_tokens=details.num_ctx_tokens,
                    decode_tokens=details.num_generation_tokens,
                    decode_requests=details.num_generation_requests,
                )
            )

    def log(self) -> None:
        """Write nothing."""

    def log_engine_initialized(self) -> None:
        """Write nothing."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Ignore; the engine is never put to sleep."""


def engine_capacity(engine: Any) -> EngineCapacity:
    """Return what a launched `AsyncLLM` can hold."""
    config = engine.vllm_config
    cache = config.cache_config
    block_size = getattr(cache, "effective_attention_block_size", None) or cache.block_size
    assert cache.num_gpu_blocks is not None
    return EngineCapacity(
        max_num_seqs=config.scheduler_config.max_num_seqs,
        # blocks x block size is wrong for hybrid models; one block is vLLM's placeholder
        kv_tokens=(cache.kv_cache_size_tokens or cache.num_gpu_blocks * block_size) - block_size,
        block_size=block_size,
        max_model_len=config.model_config.max_model_len,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
    )


def engine_output(output: Any) -> EngineOutput:
    """Return a piece of vLLM's `RequestOutput`; raises UnavailableError if the request failed."""
    completion = output.outputs[0]
    token_ids = list(completion.token_ids)
    num_cached_tokens = output.num_cached_tokens or 0
    if not output.finished:
        return EngineOutput(token_ids, num_cached_tokens)
    reason = FINISH_REASONS.get(completion.finish_reason or "")
    if reason is None:
        raise UnavailableError(
            f"vLLM failed the request (finish reason {completion.finish_reason!r})",
            hint="its log says why",
        )
    return EngineOutput(token_ids, num_cached_tokens, reason, _timing(output.metrics))


def _timing(metrics: Any) -> EngineTiming:
    """Return durations between stamps of the engine's monotonic clock; 0 for what never came."""
    if metrics is None:
        return EngineTiming(0.0, 0.0, 0.0)
    scheduled = metrics.scheduled_ts or metrics.queued_ts
    first = metrics.first_token_ts or scheduled
    last = metrics.last_token_ts or first
    return EngineTiming(
        queue_s=max(0.0, scheduled - metrics.queued_ts),
        prefill_s=max(0.0, first - scheduled),
        decode_s=max(0.0, last - first),
    )
