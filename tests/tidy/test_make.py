"""The commands of the Makefile: all listed, and clear when a machine lacks what they need."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path


def bash(*command: str, cwd: Path, path: str) -> subprocess.CompletedProcess[str]:
    """Run a command with that PATH and no other setting."""
    return subprocess.run(
        command,
        cwd=cwd,
        env={"PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_lists_every_command(root: Path) -> None:
    listed = bash("make", "help", cwd=root, path=os.environ["PATH"]).stdout
    targets = re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE)
    assert {"setup", "check", "test", "demo", "up", "down", "bench", "help"} <= set(targets)
    assert [target for target in targets if f"make {target}" not in listed] == []


def test_setup_says_which_python_it_needs(root: Path, tmp_path: Path) -> None:
    old = tmp_path / "bin" / "python3"
    old.parent.mkdir()
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.1 && exit 0\nexit 1\n')
    old.chmod(0o755)
    sh = shutil.which("bash")
    assert sh is not None
    done = bash(
        sh, str(root / ".ci" / "setup"), ".venv/.setup-1", cwd=tmp_path, path=str(old.parent)
    )
    assert done.returncode != 0
    assert "no Python 3.11 or newer found; python3 is Python 3.9.1" in done.stderr
    assert "hint: " in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_ci_runs_the_tests_and_keeps_their_exit_status(root: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    (clone / ".ci").mkdir(parents=True)
    shutil.copy(root / ".ci" / "run", clone / ".ci" / "run")
    (clone / "Makefile").write_text('test:\n\t@test "$$CI" = true\n\t@echo seen >seen\n\t@exit 5\n')
    done = bash("bash", str(clone / ".ci" / "run"), cwd=tmp_path, path=os.environ["PATH"])
    assert (clone / "seen").exists()
    assert done.returncode != 0
