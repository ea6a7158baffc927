"""Each rule of the scheduler that a mutant drops is noticed by one of its tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCHEDULER = Path("inference_service", "scheduler")
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change to one file of the scheduler, and the test file that must notice."""

    file: str
    old: str
    new: str
    noticed_by: str


MUTANTS = {
    "no age bound": Mutant(
        "overtaking.py",
        "if oldest is None or now < oldest[1] + self._half_s:",
        "if True or oldest is None:",
        "test_ready_cohort.py",
    ),
    "a due step waits for leases": Mutant(
        "room.py",
        "if is_due:\n"
        "            return self._make_room(short, session, now, after=None, of_all=True)",
        "if False:\n            return False",
        "test_ready_cohort.py",
    ),
    "shared prefixes count twice": Mutant(
        "kv_model.py",
        "sum(node.size for node in chain if not node.is_kept)",
        "sum(node.size for node in chain)",
        "test_case.py",
    ),
    "running blocks are evicted": Mutant(
        "kv_model.py",
        "            if not node.running:\n                self._free.pop(node, None)\n",
        "            if not node.running:\n",
        "test_kv_model.py",
    ),
    "no lease ends": Mutant(
        "lease.py",
        "            if chance < MIN_RETURN_CHANCE:",
        "            if False:",
        "test_lease.py",
    ),
    "what runs counts as room": Mutant(
        "kv_model.py",
        "if node.holders and not node.running and holder in node.holders",
        "if node.holders and holder in node.holders",
        "test_kv_model.py",
    ),
    "blocks are lost at a failure": Mutant(
        "lifecycle.py",
        "        self.room.leave(step)",
        "        if output_tokens:\n            self.room.leave(step)",
        "test_faults.py",
    ),
    "seats are ignored": Mutant(
        "ready_cohort.py",
        "            if self._seats() <= 0:",
        "            if False:",
        "test_ready_cohort.py",
    ),
    "a cancelled step is dispatched": Mutant(
        "lifecycle.py",
        "        if step := self.line.get(step_id):\n            self._take_out(step)\n",
        "        if self.line.get(step_id):\n",
        "test_faults.py",
    ),
    "those back first give way first": Mutant(
        "lease.py", "(-round(math.log", "(round(math.log", "test_lease.py"
    ),
    "earlier admitted give way": Mutant(
        "lease.py",
        "(after is None or (session.admitted or 0) > after)",
        "(after is None or (session.admitted or 0) < after)",
        "test_lease.py",
    ),
    "the patrol looks at the same leases again": Mutant(
        "lease.py", "            self._long_away.move_to_end(session.id)\n", "", "test_lease.py"
    ),
    "a retried step goes to the end of the line": Mutant(
        "lifecycle.py",
        "session = self._former.pop(ready.session, None)",
        "session = None",
        "test_retry.py",
    ),
    "a prewarm holds everybody back": Mutant(
        "ready_cohort.py",
        "        if self._touches.is_refreshing:\n            return True\n",
        "        if self._touches.under_way:\n            return True\n",
        "test_touch.py",
    ),
    "nobody wakes for a prewarm": Mutant(
        "ready_cohort.py", "            self._touches.next_look_s,\n", "", "test_touch.py"
    ),
    "a step goes beside its own prewarm": Mutant(
        "touch.py",
        "return self.under_way is session and self._is_prewarm",
        "return False",
        "test_touch.py",
    ),
    "prewarms never stop": Mutant(
        "touch.py",
        "return self.prewarms < MIN_PREWARMS or",
        "return self.prewarms >= 0 or",
        "test_lease.py",
    ),
    "two touches at once": Mutant(
        "ready_cohort.py",
        "if session and not self._touches.under_way:",
        "if session:",
        "test_faults.py",
    ),
    "tenants are not weighed": Mutant(
        "line.py",
        "service += step.ready.prompt_tokens / weight",
        "service += step.ready.prompt_tokens",
        "test_line.py",
    ),
    "time may run back": Mutant(
        "lifecycle.py", "if now < self.now:", "if False:", "test_ready_cohort.py"
    ),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what the scheduler's tests need."""
    target = tmp_path_factory.mktemp("mutant")
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("bench", "contracts", "inference_service", "tests/scheduler"):
        shutil.copytree(ROOT / folder, target / folder, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", target)
    return target


def passes(copy: Path, *files: str) -> bool:
    """Run test files in the copy; returns whether all of their tests pass."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    tests = [str(Path("tests", "scheduler", file)) for file in files]
    quick = ["-k", "not what_the_engine_does"]  # a failure there takes long to be made small
    run = subprocess.run(
        [*command, *quick, *tests], cwd=copy, capture_output=True, timeout=TIMEOUT_S, check=False
    )
    assert run.returncode in (0, 1), run.stdout.decode() + run.stderr.decode()
    return run.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_dropped_rule_is_noticed(name: str, copy: Path) -> None:
    mutant = MUTANTS[name]
    file = copy / SCHEDULER / mutant.file
    source = file.read_text()
    assert source.count(mutant.old) == 1, f"{mutant.file} no longer says {mutant.old!r} once"
    file.write_text(source.replace(mutant.old, mutant.new))
    try:
        assert not passes(copy, mutant.noticed_by)
    finally:
        file.write_text(source)


@pytest.mark.slow
def test_copy_without_a_change_passes(copy: Path) -> None:
    assert passes(copy, "test_ready_cohort.py", "test_lease.py", "test_line.py")
