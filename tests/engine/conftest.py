"""All engines, each started once; the small real model, converted once and kept for next time."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from inference_service.engine.openai import OpenAIEngine
from inference_service.engine.openai_wire import OpenAIConfig
from inference_service.engine.protocol import Engine, EngineDeadError
from inference_service.engine.simulated import SimulatedConfig, SimulatedEngine
from inference_service.engine.vllm import VLLMConfig, VLLMEngine
from inference_service.model import ModelFiles
from tests.engine.request import Running
from tests.engine.serve import vllm_serve


@pytest.fixture(scope="session")
def vllm_config(model_files: ModelFiles) -> VLLMConfig:
    """Return a small vLLM: 8 seats, a context of 1,024 tokens, a cache for two of those."""
    return VLLMConfig(
        model_files.path, max_num_seqs=8, max_model_len=1_024, kv_cache_bytes=50 << 20
    )


@pytest.fixture(scope="session")
def vllm_server(
    vllm_config: VLLMConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenAIConfig]:
    """Return how to reach a `vllm serve` as small as the vLLM of `vllm_config`."""
    log = tmp_path_factory.mktemp("vllm-serve") / "vllm.log"
    with vllm_serve(vllm_config, log) as url:
        yield OpenAIConfig(url, vllm_config.model, max_num_seqs=vllm_config.max_num_seqs)


@pytest_asyncio.fixture(
    scope="session",
    params=[
        "simulated",
        pytest.param("vllm", marks=pytest.mark.vllm),
        pytest.param("openai", marks=pytest.mark.vllm),
    ],
)
async def running(request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    """Return a started engine; its end holds the rules of closing."""
    engine: Engine
    match request.param:
        case "vllm":
            engine = VLLMEngine(request.getfixturevalue("vllm_config"))
        case "openai":
            engine = OpenAIEngine(request.getfixturevalue("vllm_server"))
        case _:
            small = SimulatedConfig(max_num_seqs=8, max_model_len=1_024, num_blocks=70)
            engine = SimulatedEngine(small)
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
