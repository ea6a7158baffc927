"""What the reserve for growth, the refresh of leases and yielding are worth, each on and off.

`python -m bench.ablation [--json FILE]` runs muster with these three switches of its settings on
and off over the grid's workloads, in the simulated world, and prints mean JCT and makespan of each
of the eight against the best session cap of each workload: geometric means over all of them, less
is better. FILE is a grid's: what it has is not run again. `--tools`, `--contexts`, `--pressures`,
`--arrivals`, `--caps` and `--seeds` make it narrower. Caps are chosen on the seeds that judge.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.grid import CONTEXTS, PRESSURES, SESSION_CAPS, TOOLS, fill
from bench.grid_report import Runs, cells_of, figure
from bench.journal import Journal
from bench.world.metric import geometric_mean

SWITCHES = ("reserve", "refresh", "yielding")
ARRIVALS = ("closed",)
SEEDS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Row:
    """One setting of the switches, and its figures over those of the best session caps."""

    is_on: tuple[bool, ...]
    jct_ratio: float
    makespan_ratio: float


def policy(is_on: Sequence[bool]) -> str:
    """Return the name of muster with some of the switches off."""
    return "-".join(["muster", *(name for name, on in zip(SWITCHES, is_on, strict=True) if not on)])


def settings() -> list[tuple[bool, ...]]:
    """Return every setting of the switches, all on first."""
    return list(itertools.product((True, False), repeat=len(SWITCHES)))


def rows(runs: Runs, caps: Sequence[int], seeds: Sequence[int]) -> list[Row]:
    """Return how each setting did against the session cap with the least mean JCT of each cell."""
    cells = cells_of(runs)

    def jct_s(cell: str, name: str) -> float:
        return figure(runs, cell, name, "jct_mean_s", seeds)

    best = {
        cell: min((f"sessions:{cap}" for cap in caps), key=lambda name: jct_s(cell, name))
        for cell in cells
    }

    def ratio(name: str, column: str) -> float:
        return geometric_mean(
            [
                figure(runs, cell, name, column, seeds)
                / figure(runs, cell, best[cell], column, seeds)
                for cell in cells
            ]
        )

    return [
        Row(is_on, ratio(policy(is_on), "jct_mean_s"), ratio(policy(is_on), "makespan_s"))
        for is_on in settings()
    ]


def print_rows(found: Sequence[Row]) -> None:
    """Print a line for each setting."""
    print("".join(f"{name:>10}" for name in SWITCHES) + f"{'jct':>8}{'makespan':>10}")
    for row in found:
        switches = "".join(f"{'on' if on else 'off':>10}" for on in row.is_on)
        print(f"{switches}{row.jct_ratio:>8.3f}{row.makespan_ratio:>10.3f}")


def main() -> None:
    """Run what is missing and print the table."""
    given = _arguments()
    product = itertools.product(given.arrivals, given.tools, given.contexts, given.pressures)
    cells = [f"{tool} {context} {pressure:g}x {arr}" for arr, tool, context, pressure in product]
    caps = [f"sessions:{cap}" for cap in given.caps]
    names = [*map(policy, settings()), *caps]
    keys = list(itertools.product(cells, names, given.seeds))
    journal = Journal(given.json, again=given.again)
    fill(journal, keys, given.jobs)
    print_rows(rows({key: journal.runs[key] for key in keys}, given.caps, given.seeds))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", nargs="+", default=TOOLS)
    parser.add_argument("--contexts", nargs="+", default=CONTEXTS)
    parser.add_argument("--pressures", nargs="+", type=float, default=PRESSURES)
    parser.add_argument("--arrivals", nargs="+", default=ARRIVALS)
    parser.add_argument("--caps", nargs="+", type=int, default=SESSION_CAPS, metavar="SESSIONS")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--again", nargs="*", default=(), metavar="POLICY")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="keep each run here, and take up from here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
