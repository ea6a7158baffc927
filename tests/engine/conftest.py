"""Both engines, each started once; the small real model, converted once and kept for next time."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from inference_service.engine.protocol import EngineDeadError
from inference_service.engine.simulated import SimulatedConfig, SimulatedEngine
from inference_service.engine.vllm import VLLMConfig, VLLMEngine
from inference_service.model import ModelFiles
from tests.engine.request import Running


@pytest.fixture(scope="session")
def vllm_config(model_files: ModelFiles) -> VLLMConfig:
    """Return a small vLLM: 8 seats, a context of 1,024 tokens, a cache for two of those."""
    return VLLMConfig(
        model_files.path, max_num_seqs=8, max_model_len=1_024, kv_cache_bytes=50 << 20
    )


@pytest_asyncio.fixture(
    scope="session", params=["simulated", pytest.param("vllm", marks=pytest.mark.vllm)]
)
async def running(request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    """Return a started engine; its end holds the rules of closing."""
    make: Callable[[], SimulatedEngine | VLLMEngine]
    if request.param == "vllm":
        config = request.getfixturevalue("vllm_config")
        make = lambda: VLLMEngine(config)  # noqa: E731
    else:
        small = SimulatedConfig(max_num_seqs=8, max_model_len=1_024, num_blocks=70)
        make = lambda: SimulatedEngine(small)  # noqa: E731
    engine = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's and vLLM's own, at their import
        capacity = await engine.start()
    yield Running(engine, capacity)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM leaves sockets to the garbage collector
        await engine.close()
        await engine.close()
    with pytest.raises(EngineDeadError):
        await engine.check_health()
