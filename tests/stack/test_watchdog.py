"""A worker process whose event loop works no more ends, and says where it stood."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BLOCKS = """
async def main():
    time.sleep(600)
"""

HOLDS_THE_LOCK = """
async def main():
    re.match(r"(a+)+$", "a" * 60 + "b")
"""

LEAVES_THE_LOOP = """
async def waits_for_ever():
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass

async def leaves():
    sys.exit(3)

async def main():
    tasks = [asyncio.create_task(waits_for_ever()), asyncio.create_task(leaves())]
    await asyncio.wait(tasks)
"""

ENDS = """
async def main():
    await asyncio.sleep(0)
"""


def _run(code: str) -> subprocess.CompletedProcess[str]:
    program = (
        f"import asyncio, re, sys, time\nimport uvloop\n"
        f"from muster.worker.watchdog import watched\n{code}\n"
        f"uvloop.run(watched(main(), limit_s=0.5))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("code", "where"),
    [
        (BLOCKS, "in main"),
        (HOLDS_THE_LOCK, "in match"),
        (LEAVES_THE_LOOP, "in _cancel_all_tasks"),
    ],
)
def test_process_that_works_no_more_ends(code: str, where: str) -> None:
    done = _run(code)
    assert done.returncode == 1
    assert "Timeout (0:00:00.5" in done.stderr
    assert where in done.stderr


def test_process_that_ends_is_let_alone() -> None:
    done = _run(ENDS)
    assert (done.returncode, done.stderr) == (0, "")
