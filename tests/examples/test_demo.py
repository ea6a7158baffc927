"""The demo as a newcomer runs it: one command, real parts, a real model."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.case import cases
from examples.weather.service import tomorrow
from inference_service.model import ModelFiles
from muster.stack.port import free_port
from tests.stack.command_line import CommandLine

ROOT = Path(__file__).parents[2]
DEMO_TIMEOUT_S = 400.0
LEAST_RIGHT = 0.7
"""Share of right answers that a change of prompts or tools must not fall below."""


@pytest.fixture
def command_line(tmp_path: Path, model_files: ModelFiles) -> Iterator[CommandLine]:
    """Return a command line with the small real model and ports of its own; nothing is up yet."""
    line = CommandLine(tmp_path / "data")
    line.environment |= {
        "MUSTER_ENGINE": "vllm",
        "MUSTER_MODEL": str(model_files.path),
        "MUSTER_MODEL_NAME": "smollm2",
        "MUSTER_EXAMPLE_WEATHER_URL": f"http://127.0.0.1:{free_port()}",
    }
    yield line
    line.end()


@pytest.mark.vllm
@pytest.mark.timeout(DEMO_TIMEOUT_S + 60)
def test_the_demo_answers_every_job_and_stops_what_it_started(command_line: CommandLine) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo"],
        cwd=ROOT,
        env=command_line.environment,
        capture_output=True,
        text=True,
        timeout=DEMO_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    for case in cases(tomorrow()):
        assert case.input in said
    right, asked = map(int, re.findall(r"(\d+) of (\d+) answers hold the facts", said)[0])
    assert asked >= 12
    assert right >= LEAST_RIGHT * asked, said
    for shown in ("mean cohort size", "prefill", "decode", "orchestration", "Temporal UI: http"):
        assert shown in said
    assert command_line.run("status").returncode != 0, "the demo left its stack up"
