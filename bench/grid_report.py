"""What a grid's runs say: tables for each cell, the verdict over all, and a plot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.journal import Figures, Key
from bench.plot import panels
from bench.policy import is_fixed
from bench.world.metric import geometric_mean, mean

CHOOSE_SEEDS = range(1, 6)
MAX_JCT = 1.05
MAX_MAKESPAN = 1.10
MIN_GAIN = 1.3

COLUMNS = {
    "makespan": "makespan_s",
    "jct": "jct_mean_s",
    "p50": "jct_p50_s",
    "p95": "jct_p95_s",
    "hit": "prefix_hit",
    "of": "attainable_hit",
    "preempt": "preemptions",
    "recomp": "recompute_share",
    "idle+rdy": "idle_with_ready_share",
    "idle": "idle_share",
    "overhead": "overhead_tokens",
    "cohort": "mean_cohort",
    "maxwait": "max_wait_s",
}

Runs = Mapping[Key, Figures]


@dataclass(frozen=True, slots=True)
class Judged:
    """One cell: the fixed policy that was best on the first seeds, and muster, on the others."""

    cell: str
    best: str
    jct_ratio: float
    makespan_ratio: float

    @property
    def holds(self) -> bool:
        """Whether muster is as good as it must be."""
        return self.jct_ratio <= MAX_JCT and self.makespan_ratio <= MAX_MAKESPAN


def cells_of(runs: Runs) -> list[str]:
    """Return the cells, in the order in which they were run."""
    return list(dict.fromkeys(cell for cell, _, _ in runs))


def policies_of(runs: Runs) -> list[str]:
    """Return the policies, in the order in which they were run."""
    return list(dict.fromkeys(policy for _, policy, _ in runs))


def choose_seeds(runs: Runs) -> list[int]:
    """Return the seeds on which fixed policies are chosen; all, if there are no others."""
    seeds = sorted({seed for _, _, seed in runs})
    return [seed for seed in seeds if seed in CHOOSE_SEEDS] or seeds


def judge_seeds(runs: Runs) -> list[int]:
    """Return the seeds on which all are judged; all, if there are no others."""
    seeds = sorted({seed for _, _, seed in runs})
    return [seed for seed in seeds if seed not in CHOOSE_SEEDS] or seeds


def figure(runs: Runs, cell: str, policy: str, name: str, seeds: Iterable[int]) -> float:
    """Return the mean of a figure over seeds."""
    return mean([float(runs[cell, policy, seed][name]) for seed in seeds])


def best_fixed(runs: Runs, cell: str, seeds: Iterable[int], prefix: str = "") -> str:
    """Return the fixed policy (of a kind) with the least mean JCT on these seeds."""
    seeds = list(seeds)
    names = [p for p in policies_of(runs) if is_fixed(p) and p.startswith(prefix)]
    return min(names, key=lambda name: figure(runs, cell, name, "jct_mean_s", seeds))


def judge(runs: Runs, cell: str) -> Judged:
    """Hold muster against the best fixed policy of a cell."""
    best = best_fixed(runs, cell, choose_seeds(runs))
    seeds = judge_seeds(runs)

    def ratio(name: str) -> float:
        return figure(runs, cell, "muster", name, seeds) / figure(runs, cell, best, name, seeds)

    return Judged(cell, best, ratio("jct_mean_s"), ratio("makespan_s"))


def gains(runs: Runs) -> dict[str, float]:
    """Return, per fixed policy, the geometric mean over all cells of its JCT over muster's."""
    seeds = judge_seeds(runs)
    found = {}
    for policy in policies_of(runs):
        if is_fixed(policy):
            ratios = [
                figure(runs, cell, policy, "jct_mean_s", seeds)
                / figure(runs, cell, "muster", "jct_mean_s", seeds)
                for cell in cells_of(runs)
            ]
            found[policy] = geometric_mean(ratios)
    return found


def print_cells(runs: Runs, *, every: bool) -> None:
    """Print a table for each cell: every policy, or those that matter."""
    seeds = judge_seeds(runs)
    present = policies_of(runs)
    for cell in cells_of(runs):
        names = present
        if not every:
            best = best_fixed(runs, cell, choose_seeds(runs))
            names = [n for n in dict.fromkeys(("plain", best, "muster", "bound")) if n in present]
        print(f"\n{cell}{'':{max(1, 25 - len(cell))}}" + "".join(f"{c:>9}" for c in COLUMNS))
        for name in names:
            values = [figure(runs, cell, name, column, seeds) for column in COLUMNS.values()]
            print(f"  {name:<23}" + "".join(_cell(value) for value in values))


def print_verdict(runs: Runs) -> None:
    """Print how muster does against the best fixed policy per cell, and against each over all."""
    if not any(map(is_fixed, policies_of(runs))):
        return
    print(f"\n{'cell':<31}{'best fixed':<14}{'jct':>7}{'makespan':>10}")
    judged = [judge(runs, cell) for cell in cells_of(runs)]
    for row in judged:
        mark = "" if row.holds else "  <--"
        print(f"{row.cell:<31}{row.best:<14}{row.jct_ratio:>7.3f}{row.makespan_ratio:>10.3f}{mark}")
    print(
        f"\n{sum(row.holds for row in judged)} of {len(judged)} cells hold (muster / best fixed: "
        f"JCT <= {MAX_JCT}, makespan <= {MAX_MAKESPAN}); geometric means "
        f"{geometric_mean([row.jct_ratio for row in judged]):.3f}, "
        f"{geometric_mean([row.makespan_ratio for row in judged]):.3f}"
    )
    against = sorted(gains(runs).items(), key=lambda item: item[1])
    print(f"JCT of one fixed policy for all cells over muster's (must be >= {MIN_GAIN}):")
    print("  " + ", ".join(f"{name} {gain:.2f}" for name, gain in against[:6]))


def save_plot(runs: Runs, path: Path) -> None:
    """Draw each cell's mean JCT over that of its best fixed policy."""
    cells, seeds, present = cells_of(runs), judge_seeds(runs), policies_of(runs)
    best = {cell: best_fixed(runs, cell, choose_seeds(runs)) for cell in cells}
    with panels(path, 1, width=8, height=1 + 0.22 * len(cells)) as (axes,):
        for name, mark in (("plain", "x"), ("priority", "+"), ("muster", "o"), ("bound", "|")):
            if name in present:
                ratios = [
                    figure(runs, cell, name, "jct_mean_s", seeds)
                    / figure(runs, cell, best[cell], "jct_mean_s", seeds)
                    for cell in cells
                ]
                axes.plot(ratios, range(len(cells)), mark, label=name)
        axes.axvline(1.0, color="grey", linewidth=1)
        axes.axvline(MAX_JCT, color="grey", linewidth=1, linestyle=":")
        axes.set_xscale("log")
        axes.set_yticks(range(len(cells)), [f"{c} ({best[c]})" for c in cells], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("mean JCT over that of the cell's best fixed policy (in brackets)")
        axes.legend()


def _cell(value: float) -> str:
    return f"{value:9.3f}" if abs(value) < 10 or math.isnan(value) else f"{value:9.1f}"
