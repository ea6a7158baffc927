"""Every program leaves with the right status, and every error is one line with a hint."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUNS = 100

CONNECTING = """
import asyncio
from muster import exit as way_out
from muster.connection import connect_to

async def main() -> int:
    client = await connect_to({address!r})
    async for _ in client.list_workflows(limit=1):
        pass
    print("done")
    return {status}

way_out.run(lambda: asyncio.run(main()))
"""

ENDING = """
from pathlib import Path
from contracts.error import BadInputError
from muster import exit as way_out

def main() -> int | None:
    {body}

way_out.run(main, log_dir=lambda: Path({log_dir!r}))
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def statuses(commands: Sequence[Sequence[str]], environment: dict[str, str]) -> list[int]:
    def one(command: Sequence[str]) -> int:
        done = subprocess.run(
            command, env=environment, capture_output=True, timeout=100, check=False
        )
        return done.returncode

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return list(pool.map(one, commands))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_programs_that_connect_leave_with_their_status(temporal_address: str) -> None:
    status = 3
    code = CONNECTING.format(address=temporal_address, status=status)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    commands = [[sys.executable, "-c", code]] * RUNS
    assert statuses(commands, environment) == [status] * RUNS


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_runs_of_jobs_leave_with_status_0(temporal_address: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MUSTER_DATA_DIR": str(tmp_path),
        "MUSTER_TEMPORAL_ADDRESS": temporal_address,
    }
    commands = [[sys.executable, "-m", "muster", "jobs", "--json"]] * RUNS
    assert statuses(commands, environment) == [0] * RUNS


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("return 5", 5, ""),
        ("return None", 0, ""),
        ("raise SystemExit(4)", 4, ""),
        ("raise SystemExit('why')", 1, ""),
        ("raise KeyboardInterrupt", 130, ""),
        ("raise BrokenPipeError", 141, ""),
        ("raise BadInputError('a\\nb', hint='c')", 1, "error: a b\nhint: c\n"),
        ("raise ExceptionGroup('g', [BadInputError('deep')])", 1, "error: deep\n"),
    ],
)
def test_each_way_to_end_has_its_status(tmp_path: Path, body: str, status: int, said: str) -> None:
    done = run(ENDING.format(body=body, log_dir=str(tmp_path)))
    assert done.returncode == status
    assert done.stderr == said


def test_unforeseen_error_is_one_line_and_its_traceback_is_in_the_log(tmp_path: Path) -> None:
    done = run(ENDING.format(body="return 1 // 0", log_dir=str(tmp_path)))
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()
    assert error == "error: unexpected ZeroDivisionError: integer division or modulo by zero"
    assert str(tmp_path / "muster.log") in hint
    assert "Traceback (most recent call last)" in (tmp_path / "muster.log").read_text()


def test_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    code = ENDING.format(body="print('x' * 10_000_000)", log_dir=str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141
