"""vLLM's processes: they die with the service, and their death is told as such."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from contracts.error import BadInputError
from inference_service.engine.guardian import descendants
from inference_service.engine.protocol import EngineDeadError
from inference_service.engine.vllm import VLLMConfig, VLLMEngine
from tests.engine.request import Running, run, until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

GONE_S = 10.0

SERVICE = """
import asyncio, json, os, sys
from pathlib import Path
from inference_service.engine.guardian import descendants
from inference_service.engine.vllm import VLLMConfig, VLLMEngine

async def serve(config):
    await VLLMEngine(VLLMConfig(**{**config, "model": Path(config["model"])})).start()
    print(json.dumps(descendants(os.getpid())), flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
"""


def engine_processes(processes: Iterable[int]) -> list[int]:
    """Return those of the processes that are alive and run the model."""
    found: list[int] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            status = psutil.Process(process)
            if status.status() != psutil.STATUS_ZOMBIE and "VLLM" in " ".join(status.cmdline()):
                found.append(process)
    return found


async def test_processes_die_with_a_killed_service(vllm_config: VLLMConfig, tmp_path: Path) -> None:
    script = tmp_path / "service.py"
    script.write_text(SERVICE)
    config = json.dumps({**asdict(vllm_config), "model": str(vllm_config.model)})
    service = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        config,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert service.stdout is not None
    try:
        line = await service.stdout.readline()
    finally:
        service.kill()
        await service.wait()
    processes = json.loads(line)

    async def gone() -> bool:
        return not engine_processes(processes)

    assert processes
    await until(gone, GONE_S)


async def test_requests_lost_by_death_or_close_are_told_so_and_a_new_start_serves(
    vllm_config: VLLMConfig,
) -> None:
    before = set(descendants(os.getpid()))
    engine = VLLMEngine(vllm_config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        capacity = await engine.start()
        running = Running(engine, capacity)
        outputs = engine.generate(running.request("Tell me a long story.", max_tokens=900))
        await anext(outputs)
        for process in engine_processes(set(descendants(os.getpid())) - before):
            os.kill(process, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            async for _ in outputs:
                pass
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        await engine.start()
        await run(engine, running.request("Hello.", 2))
        outputs = engine.generate(running.request("Tell me a long story.", max_tokens=900))
        await anext(outputs)
        await engine.close()
        with pytest.raises(EngineDeadError):
            async for _ in outputs:
                pass
    assert engine_processes(set(descendants(os.getpid())) - before) == []


async def test_context_longer_than_the_models_window_is_refused_with_both_numbers(
    vllm_config: VLLMConfig,
) -> None:
    engine = VLLMEngine(replace(vllm_config, max_model_len=100_000))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(BadInputError, match=r"100,000 tokens.*8,192 tokens") as caught:
            await engine.start()
    assert "8192" in caught.value.hint
    with pytest.raises(EngineDeadError):
        await engine.check_health()
