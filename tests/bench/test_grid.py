"""The grid takes up where it stopped, chooses on some seeds and judges on others."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bench.grid import fill, run_named
from bench.grid_report import best_fixed, choose_seeds, gains, judge, judge_seeds
from bench.journal import Figures, Journal, Key
from bench.workload import Cell

CELL = "3 0.5k 2x closed"


@pytest.mark.parametrize("name", [CELL, "mixed+never mixed 10x poisson", "0.1 2k 4x closed"])
def test_cell_is_what_its_name_says(name: str) -> None:
    assert Cell.named(name).name == name


def test_runs_are_kept_and_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    keys: list[Key] = [(CELL, "plain", 1), (CELL, "sessions:2", 1)]
    fill(Journal(path), keys[:1], jobs=1)
    path.write_text(path.read_text() + '{"cell": "torn')
    journal = Journal(path)
    assert list(journal.runs) == keys[:1]
    fill(journal, keys, jobs=1)
    assert list(Journal(path).runs) == keys
    assert Journal(path).runs == journal.runs
    assert list(Journal(path, again=["plain"]).runs) == keys[1:]


def test_run_without_end_is_kept_as_infinite(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "runs.jsonl")
    journal.add((CELL, "plain", 1), {"jct_mean_s": math.inf})
    assert "null" in (tmp_path / "runs.jsonl").read_text()
    assert Journal(tmp_path / "runs.jsonl").runs == journal.runs


def test_two_processes_find_what_one_does() -> None:
    keys: list[Key] = [(CELL, "sessions:4", seed) for seed in (1, 2)]
    one, two = Journal(), Journal()
    fill(one, keys, jobs=1)
    fill(two, keys, jobs=2)
    assert one.runs == two.runs


def test_bound_loses_nothing_of_its_cache() -> None:
    metrics = run_named(Cell.named(CELL), "bound", 1)
    assert metrics.prefix_hit == metrics.attainable_hit
    assert metrics.recompute_share == metrics.preemptions == 0


def test_fixed_policy_is_chosen_on_first_seeds_and_judged_on_others() -> None:
    def figures(value: float) -> Figures:
        return {"jct_mean_s": value, "makespan_s": 10 * value}

    runs = {("c", p, seed): figures(v) for p, v in (("a", 2), ("b", 3)) for seed in (1, 5)}
    runs |= {("c", p, 6): figures(v) for p, v in (("a", 9), ("b", 6), ("muster", 3))}
    runs |= {("c", "muster", seed): figures(1) for seed in (1, 5)}
    assert (choose_seeds(runs), judge_seeds(runs)) == ([1, 5], [6])
    assert best_fixed(runs, "c", [1, 5]) == "a"
    assert judge(runs, "c").jct_ratio == pytest.approx(1 / 3)
    assert gains(runs) == pytest.approx({"a": 3, "b": 2})
