"""The no-tuning grid: every kind of workload, every policy, in the simulated world."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module

from bench.policy import ContinuationFirst, Plain, RequestCap, SessionCap
from bench.workload import Cell, make_plans, unlimited
from bench.world.engine import EngineModel
from bench.world.metric import Metrics, mean
from bench.world.world import PolicyFactory, World


def run_cell(
    cell: Cell, policy_factory: PolicyFactory, seed: int, model: EngineModel | None = None
) -> Metrics:
    """Run one policy over one cell's workload of that seed."""
    model = model or EngineModel()
    return World(make_plans(cell, seed, model), policy_factory, model).run()


def run_named(cell: Cell, name: str, seed: int, model: EngineModel | None = None) -> Metrics:
    """Run a policy by its name; "bound" is plain with a cache without limit."""
    model = model or EngineModel()
    plans = make_plans(cell, seed, model)
    if name == "bound":
        return World(plans, Plain, unlimited(model, plans)).run()
    return World(plans, policy(name), model).run()


def policy(name: str) -> PolicyFactory:
    """Return the policy of a name: plain, priority, requests:N, sessions:N, muster."""
    kind, _, limit = name.partition(":")
    match kind:
        case "plain":
            return Plain
        case "priority":
            return ContinuationFirst
        case "requests":
            return partial(RequestCap, limit=int(limit))
        case "sessions":
            return partial(SessionCap, limit=int(limit))
        case "muster":
            module = import_module("inference_service.scheduler.ready_cohort")
            return partial(module.ReadyCohort, settings=module.SchedulerSettings())
        case _:
            raise ValueError(f"no policy is called {name!r}")


def main() -> None:
    """Print a table of cells and policies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", nargs="*", default=["3"])
    parser.add_argument("--contexts", nargs="*", default=["2k"])
    parser.add_argument("--pressures", nargs="*", type=float, default=[4])
    parser.add_argument("--arrivals", nargs="*", default=["closed"])
    parser.add_argument("--never", action="store_true")
    parser.add_argument("--policies", nargs="*", default=["plain", "sessions:6", "bound"])
    parser.add_argument("--seeds", nargs="*", type=int, default=[1])
    given = parser.parse_args()
    kinds = itertools.product(given.tools, given.contexts, given.pressures, given.arrivals)
    for tool, context, pressure, arrivals in kinds:
        cell = Cell(tool, context, pressure, given.never, arrivals)
        print(f"\n{cell.name}")
        print(HEAD)
        for name in given.policies:
            start_s = time.process_time()
            runs = [run_named(cell, name, seed) for seed in given.seeds]
            print(row(name, runs, (time.process_time() - start_s) / len(runs)))


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
HEAD = " " * 14 + "".join(f"{name:>9}" for name in COLUMNS) + "    cpu"


def row(name: str, runs: Sequence[Metrics], cpu_s: float) -> str:
    """Return one line of the table: means over the seeds."""
    values = [mean([getattr(run, column) for run in runs]) for column in COLUMNS.values()]
    cells = (f"{value:9.3f}" if abs(value) < 10 else f"{value:9.1f}" for value in values)
    return f"{name:<14}{''.join(cells)} {cpu_s:6.2f}"


if __name__ == "__main__":
    main()
