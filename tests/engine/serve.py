"""A `vllm serve` of the small model as a child process, as people run it themselves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from inference_service.engine.guardian import descendants
from inference_service.engine.vllm import VLLMConfig
from muster.stack.port import free_port

START_S = 240.0
STOP_S = 20.0

ARGUMENTS = (
    *("--block-size", "32", "--scheduling-policy", "priority", "--enforce-eager"),
    # vLLM's CPU build dies of a seeded sample whose prompt is computed in chunks
    *("--max-num-batched-tokens", "1024", "--enable-prompt-tokens-details"),
    *("--structured-outputs-config", '{"backend":"xgrammar","disable_any_whitespace":true}'),
)

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
}


@contextlib.contextmanager
def vllm_serve(config: VLLMConfig, log: Path) -> Iterator[str]:
    """Run a server until the end of the context; yields its URL. Its log names what went wrong."""
    port = free_port()
    command = [
        # what `vllm serve` runs; the program itself looks for a package that the CPU build is not
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(config.model)),
        *("--served-model-name", "small", "--host", "127.0.0.1", "--port", str(port)),
        *("--max-num-seqs", str(config.max_num_seqs), "--max-model-len", str(config.max_model_len)),
        *("--kv-cache-memory-bytes", str(config.kv_cache_bytes), *ARGUMENTS),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_up(process, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        _stop(process)


def _wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url).status_code == 200:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"vllm serve is not up: {log.read_text()[-2_000:]}")
        time.sleep(0.2)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end; kill what is left of it, by id."""
    left = [process.pid, *descendants(process.pid)]
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
