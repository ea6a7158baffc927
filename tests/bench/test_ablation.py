"""The ablation runs every setting of the switches and holds each against the best session cap."""

from __future__ import annotations

import itertools

import pytest

from bench.ablation import Row, policy, print_rows, rows, settings
from bench.grid import fill
from bench.journal import Figures, Journal, Key

CELLS = ("3 0.5k 2x closed", "30 0.5k 2x closed")


def test_every_setting_has_a_policy_of_its_own() -> None:
    names = list(map(policy, settings()))
    assert names[0] == "muster"
    assert names[-1] == "muster-reserve-refresh-yielding"
    assert len(set(names)) == 8


def test_settings_are_held_against_the_best_cap_of_each_workload() -> None:
    def figures(jct_s: float) -> Figures:
        return {"jct_mean_s": jct_s, "makespan_s": 3 * jct_s}

    runs: dict[Key, Figures] = {}
    for cell, (two, four) in zip(CELLS, [(10.0, 20.0), (40.0, 20.0)], strict=True):
        runs[cell, "sessions:2", 1], runs[cell, "sessions:4", 1] = figures(two), figures(four)
        for name in map(policy, settings()):
            runs[cell, name, 1] = figures(10.0 if name == "muster" else 20.0)
    found = rows(runs, [2, 4], [1])
    assert found[0].jct_ratio == found[0].makespan_ratio == pytest.approx(0.5**0.5)
    assert {round(row.jct_ratio, 6) for row in found[1:]} == {round(2**0.5, 6)}


def test_switches_change_what_is_decided(capsys: pytest.CaptureFixture[str]) -> None:
    names = [policy((True, True, True)), policy((False, True, True)), policy((True, False, True))]
    journal = Journal()
    fill(journal, list(itertools.product(["3 2k 4x closed"], names, [1])), jobs=1)
    assert len({run["digest"] for run in journal.runs.values()}) == len(names)
    print_rows([Row((True, True, False), 0.98, 1.0)])
    assert "off   0.980     1.000" in capsys.readouterr().out
