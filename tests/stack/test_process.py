"""A child process ends when it is told to, takes its group along, and is never left running."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from contracts.error import UnavailableError
from muster.stack.process import ChildProcess, Command, describe_status, run_briefly
from tests.stack.command_line import is_gone, wait_until

ROOT = Path(__file__).resolve().parents[2]

PARENT_OF_ONE = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(600)\n"
)
DEAF = (
    "import signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('ready', flush=True)\n"
    "time.sleep(600)\n"
)


def python(code: str, cwd: Path, stop_timeout_s: float = 10.0) -> Command:
    return Command(argv=[sys.executable, "-c", code], cwd=cwd, stop_timeout_s=stop_timeout_s)


async def test_kill_ends_grandchildren(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = ChildProcess.start(python(PARENT_OF_ONE, tmp_path), log)
    wait_until(lambda: log.read_text().endswith("\n"))
    grandchild = psutil.Process(int(log.read_text()))
    assert await child.kill() == -signal.SIGKILL
    wait_until(lambda: is_gone(grandchild))


async def test_child_that_ignores_the_stop_signal_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = ChildProcess.start(python(DEAF, tmp_path, stop_timeout_s=0.2), log)
    wait_until(lambda: log.read_text() == "ready\n")
    assert await child.stop() == -signal.SIGKILL


async def test_status_of_a_child_is_its_own(tmp_path: Path) -> None:
    child = ChildProcess.start(python("raise SystemExit(7)", tmp_path), tmp_path / "log")
    assert await child.wait() == 7
    assert child.returncode == 7
    assert await child.stop() == 7


async def test_program_that_does_not_exist_says_so_in_the_log(tmp_path: Path) -> None:
    child = ChildProcess.start(Command(argv=["/no/such/program"], cwd=tmp_path), tmp_path / "log")
    assert await child.wait() == 127
    assert "/no/such/program: No such file or directory" in (tmp_path / "log").read_text()


async def test_all_below_a_killed_process_dies_with_it(tmp_path: Path) -> None:
    """Its child by the kernel, its child's children by the sentinel."""
    inner, log = tmp_path / "inner", tmp_path / "log"
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import asyncio, pathlib\n"
        "from muster.stack.guard import guard\n"
        "from muster.stack.process import ChildProcess, Command\n"
        "async def main():\n"
        "    guard.start()\n"
        f"    command = Command(argv=[sys.executable, '-c', {PARENT_OF_ONE!r}],\n"
        "                      cwd=pathlib.Path('/'))\n"
        f"    child = ChildProcess.start(command, pathlib.Path({str(inner)!r}))\n"
        "    print(child.pid, flush=True)\n"
        "    await child.wait()\n"
        "asyncio.run(main())\n"
    )
    process = ChildProcess.start(python(code, tmp_path), log)
    wait_until(lambda: log.read_text().endswith("\n") and inner.read_text().endswith("\n"))
    below = psutil.Process(process.pid).children(recursive=True)
    assert {int(log.read_text()), int(inner.read_text())} < {found.pid for found in below}
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: all(is_gone(found) for found in below))
    await process.wait()


async def test_run_briefly_returns_the_first_line_or_names_the_failure(tmp_path: Path) -> None:
    assert await run_briefly(python("print('one\\ntwo')", tmp_path)) == "one"
    with pytest.raises(UnavailableError, match="status 3: no luck"):
        await run_briefly(python("print('no luck'); raise SystemExit(3)", tmp_path))
    with pytest.raises(UnavailableError, match="SIGKILL"):
        await run_briefly(python("import time; time.sleep(600)", tmp_path), timeout_s=0.2)


def test_statuses_have_words() -> None:
    assert describe_status(1) == "status 1"
    assert describe_status(-9) == "signal SIGKILL"
    assert describe_status(-99) == "signal 99"
