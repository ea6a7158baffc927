"""Engines for live benches: real vLLM with a small model and a cache of a given size, or simulated.

Both are told to hold `num_blocks` blocks. vLLM keeps one block of its pool to itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.world.engine import EngineModel
from inference_service.engine.protocol import Engine, EngineRequest
from inference_service.engine.simulated import SimulatedConfig, SimulatedEngine
from inference_service.engine.vllm import VLLMConfig, VLLMEngine
from inference_service.model import prepare_model
from inference_service.scheduler.event import CapacityChanged

if TYPE_CHECKING:
    from vllm import SamplingParams

MODEL_WINDOW = 8_192
ANSWER = "x" * 4_096


@dataclass(frozen=True, slots=True)
class LiveEngine:
    """A started engine, what the policies are told of it, and ids that its model takes."""

    engine: Engine
    capacity: CapacityChanged
    vocabulary: range


class SteadyVLLM(VLLMEngine):
    """vLLM whose answers are as long as was asked for, whatever the model would say."""

    def _sampling(self, request: EngineRequest) -> SamplingParams:
        params: Any = super()._sampling(request)
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            ignore_eos=True,
            detokenize=False,
            output_kind=params.output_kind,
        )


@asynccontextmanager
async def live_engine(
    kind: str, model: EngineModel, *, data_dir: Path | None = None, time_scale: float = 1.0
) -> AsyncIterator[LiveEngine]:
    """Start an engine of a kind ("vllm", "simulated") with the sizes of `model`; stop it after.

    The simulated one takes `time_scale` wall seconds per second of its cost model.
    """
    window = min(model.max_model_len, model.num_blocks * model.block_size)
    engine: SimulatedEngine | VLLMEngine
    if kind == "simulated":
        vocabulary = range(ord("a"), ord("z") + 1)
        engine = _simulated(model, window, time_scale)
    else:
        vocabulary = range(1_000, 40_000)
        directory = data_dir or Path(tempfile.gettempdir())
        files = prepare_model("smollm2", directory, lambda line: print(line, flush=True))
        engine = SteadyVLLM(
            VLLMConfig(
                model=files.path,
                max_num_seqs=model.max_num_seqs,
                max_model_len=min(window, MODEL_WINDOW),
                num_gpu_blocks_override=model.num_blocks + 1,
                block_size=model.block_size,
                max_num_batched_tokens=model.max_num_batched_tokens,
            )
        )
    try:
        await engine.start()
        yield LiveEngine(engine, model.capacity, vocabulary)
    finally:
        await engine.close()


def _simulated(model: EngineModel, window: int, time_scale: float) -> SimulatedEngine:
    config = SimulatedConfig(
        max_num_seqs=model.max_num_seqs,
        num_blocks=model.num_blocks,
        block_size=model.block_size,
        max_model_len=window,
        max_num_batched_tokens=model.max_num_batched_tokens,
        cost=model.cost,
        time_scale=time_scale,
    )
    return SimulatedEngine(config, lambda _request, _prompt: ANSWER)
