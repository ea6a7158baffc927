"""The no-tuning grid: every kind of workload, every policy, in the simulated world.

`python -m bench.grid [--json FILE] [--plot FILE]` runs what is missing in FILE (JSON lines, one
run each) and prints, for each cell, the figures of plain vLLM, the best fixed policy, muster and
a cache without limit; then how muster does against every fixed policy over the whole grid. Fixed
policies are chosen on seeds 1 to 5 by mean JCT, and all are judged on the other seeds.

A narrower grid: `--tools 3 mixed+never --contexts 2k --pressures 4 --arrivals poisson`, and
`--policies plain sessions:6 muster --seeds 1 2` for a quick look. `--again muster` forgets the
runs of a policy that has changed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from bench.grid_report import print_cells, print_verdict, save_plot
from bench.journal import Journal, Key
from bench.policy import Plain, named_policy
from bench.workload import Cell, make_plans, unlimited
from bench.world.engine import EngineModel
from bench.world.metric import Metrics
from bench.world.world import PolicyFactory, World

TOOLS = ("0.1", "3", "30", "mixed", "mixed+never")
CONTEXTS = ("0.5k", "2k", "mixed")
PRESSURES = (2.0, 4.0, 10.0)
SESSION_CAPS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 96)
REQUEST_CAPS = (2, 4, 6, 8, 12, 16, 24)
FIXED = (
    "plain",
    "priority",
    *(f"requests:{cap}" for cap in REQUEST_CAPS),
    *(f"sessions:{cap}" for cap in SESSION_CAPS),
)
SEEDS = tuple(range(1, 11))


def run_cell(
    cell: Cell, policy_factory: PolicyFactory, seed: int, model: EngineModel | None = None
) -> Metrics:
    """Run one policy over one cell's workload of that seed."""
    model = model or EngineModel()
    return World(make_plans(cell, seed, model), policy_factory, model).run()


def run_named(cell: Cell, name: str, seed: int, model: EngineModel | None = None) -> Metrics:
    """Run a policy by its name; "bound" is plain with a cache without limit."""
    model = model or EngineModel()
    if name != "bound":
        return run_cell(cell, named_policy(name), seed, model)
    plans = make_plans(cell, seed, model)
    return World(plans, Plain, unlimited(model, plans)).run()


def fill(journal: Journal, keys: Sequence[Key], jobs: int) -> None:
    """Run what the journal lacks, in that many processes."""
    missing = [key for key in keys if key not in journal]
    if jobs == 1:
        for key in missing:
            journal.add(key, _run(key))
        return
    start_s = time.monotonic()
    with ProcessPoolExecutor(jobs) as pool:
        futures = {pool.submit(_run, key): key for key in missing}
        for number, future in enumerate(as_completed(futures), 1):
            journal.add(futures[future], future.result())
            if number % 500 == 0:
                rest_s = (time.monotonic() - start_s) / number * (len(missing) - number)
                print(f"{number:,} of {len(missing):,}, {rest_s:.0f} s left", file=sys.stderr)


def _run(key: Key) -> dict[str, object]:
    cell, policy, seed = key
    return run_named(Cell.named(cell), policy, seed).as_dict()


def main() -> None:
    """Run the grid, or a part of it, and print what came out."""
    given = _arguments()
    product = itertools.product(given.arrivals, given.tools, given.contexts, given.pressures)
    cells = [f"{tool} {context} {pressure:g}x {arr}" for arr, tool, context, pressure in product]
    keys = list(itertools.product(cells, given.policies, given.seeds))
    journal = Journal(given.json, again=given.again)
    fill(journal, keys, given.jobs)
    runs = {key: journal.runs[key] for key in keys}
    print_cells(runs, every=len(given.policies) <= 12)
    if "muster" in given.policies:
        print_verdict(runs)
    if given.plot:
        save_plot(runs, given.plot)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", nargs="+", default=TOOLS)
    parser.add_argument("--contexts", nargs="+", default=CONTEXTS)
    parser.add_argument("--pressures", nargs="+", type=float, default=PRESSURES)
    parser.add_argument("--arrivals", nargs="+", default=("closed", "poisson"))
    parser.add_argument("--policies", nargs="+", default=(*FIXED, "muster", "bound"))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--again", nargs="*", default=(), metavar="POLICY")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="keep each run here, and take up from here")
    parser.add_argument("--plot", type=Path, help="an image file (needs the `bench` extra)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
