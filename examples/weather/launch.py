"""Run the weather service beside a program that needs it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from contracts.error import UnavailableError
from examples.weather.service import DEFAULT_PORT, SERVICE
from examples.weather.tools import DEFAULT_URL

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
POLL_S = 0.05
ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def running_service() -> Iterator[str]:
    """Have the service run, and yield its address; one that runs already is left as it is.

    The address is the one the tool uses. Raises `UnavailableError` if another program holds it.
    """
    url = os.environ.get("MUSTER_EXAMPLE_WEATHER_URL", DEFAULT_URL)
    if _answers(url):
        yield url
        return
    port = urlsplit(url).port or DEFAULT_PORT
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.weather.service", "--port", str(port)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )
    try:
        _wait_until_up(process, url)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_up(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _answers(url):
        if process.poll() is not None:
            raise UnavailableError(
                f"the example's weather service did not start at {url}",
                hint="if its port is taken, set MUSTER_EXAMPLE_WEATHER_URL to"
                " http://127.0.0.1:PORT with a free port, for the stack too if it is up",
            )
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"the example's weather service did not answer at {url} in {START_TIMEOUT_S:.0f} s"
            )
        time.sleep(POLL_S)


def _answers(url: str) -> bool:
    """Tell whether our service, not just any program, answers there."""
    try:
        answer = httpx.get(f"{url}/health", timeout=1.0, trust_env=False)
        return bool(answer.json()["service"] == SERVICE)
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return False
