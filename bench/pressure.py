"""Agents under KV pressure on a real engine: what each policy makes of one cache.

`python -m bench.pressure --json FILE [--plot FILE]` runs, per cell and seed, in wall time: plain
vLLM, the request cap that is best in the simulator, vLLM's priority with continuations first, the
simulator's best session cap and its neighbours, muster; then, on a second engine whose cache holds
all sessions, the bound (plain) and muster again ("bound-muster": below the cliff it must cost
nothing). The first engine cannot stand in for the second: only a cache that is small evicts. The
prefix cache is emptied between runs, and the order of the policies turns with the seed.

`--engine simulated --time-scale 0.05` runs the same without a model. Each run takes minutes:
FILE keeps it, and a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from bench.grid import REQUEST_CAPS, SESSION_CAPS, fill
from bench.grid_report import best_fixed, cells_of, policies_of
from bench.journal import Figures, Journal, Key
from bench.live import LiveLoop
from bench.live_engine import live_engine
from bench.plot import save_bars
from bench.policy import named_policy
from bench.workload import Cell, make_plans, unlimited
from bench.world.engine import EngineModel

CELLS = ("3 2k 4x closed", "3 2k 4x poisson")
SEEDS = (1, 2, 3, 4, 5)
KEYS = (
    "makespan_s",
    "jct_mean_s",
    "jct_p50_s",
    "jct_p95_s",
    "prefix_hit",
    "attainable_hit",
    "preemptions",
    "recompute_share",
    "idle_with_ready_share",
    "overhead_tokens",
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What all runs of one call have in common."""

    engine: str
    model: EngineModel
    data_dir: Path
    time_scale: float


@cache
def best_cap(cell: str, kind: str, seeds: Sequence[int] = SEEDS) -> int:
    """Return the cap of a kind with the least mean JCT in the simulator."""
    caps = SESSION_CAPS if kind == "sessions" else REQUEST_CAPS
    journal = Journal()
    fill(journal, [(cell, f"{kind}:{cap}", seed) for cap in caps for seed in seeds], jobs=1)
    return int(best_fixed(journal.runs, cell, seeds).partition(":")[2])


def policies_for(cell: str) -> list[str]:
    """Return the policies of a cell: the simple ones, the best caps, muster, and the bounds."""
    cap = best_cap(cell, "sessions")
    caps = [f"sessions:{number}" for number in (cap - 1, cap, cap + 1) if number > 0]
    requests = f"requests:{best_cap(cell, 'requests')}"
    return ["plain", requests, "priority", *caps, "muster", "bound", "bound-muster"]


async def run_all(journal: Journal, wanted: Sequence[Key], setting: Setting) -> None:
    """Run what the journal lacks: seed by seed, all runs of one engine after another."""
    missing = [key for key in wanted if key not in journal]
    for cell, seed in dict.fromkeys((cell, seed) for cell, _, seed in missing):
        here = [policy for c, policy, s in missing if (c, s) == (cell, seed)]
        turn = seed % len(here)
        turned = [*here[turn:], *here[:turn]]
        for is_bound in (False, True):
            names = [name for name in turned if name.startswith("bound") == is_bound]
            if names:
                await _run_on_one_engine(journal, (cell, seed), names, setting)


async def _run_on_one_engine(
    journal: Journal, place: tuple[str, int], names: Iterable[str], setting: Setting
) -> None:
    cell, seed = place
    plans = make_plans(Cell.named(cell), seed, setting.model)
    model = setting.model
    names = list(names)
    if names[0].startswith("bound"):
        model = unlimited(model, plans)
    scale = setting.time_scale
    async with live_engine(
        setting.engine, model, data_dir=setting.data_dir, time_scale=scale
    ) as live:
        for name in names:
            policy = named_policy({"bound": "plain"}.get(name, name.removeprefix("bound-")))
            loop = LiveLoop(
                plans,
                policy,
                live.engine,
                live.capacity,
                vocabulary=live.vocabulary,
                seed=seed,
                time_scale=scale,
            )
            figures = (await loop.run()).as_dict()
            journal.add((cell, name, seed), figures)
            print(f"{cell}, seed {seed}, {name}: {_short(figures)}", flush=True)


def _short(figures: Figures) -> str:
    return ", ".join(f"{key} {figures[key]:.3g}" for key in KEYS[:5])


def medians(runs: dict[Key, Figures], cell: str, policy: str) -> dict[str, float]:
    """Return the medians over the seeds of each figure of a policy, and the spread of its JCT."""
    rows = [figures for (c, p, _), figures in runs.items() if (c, p) == (cell, policy)]
    found = {key: statistics.median(float(row[key]) for row in rows) for key in KEYS}
    jct_s = [float(row["jct_mean_s"]) for row in rows]
    return found | {"jct_spread": (max(jct_s) - min(jct_s)) / found["jct_mean_s"]}


def print_report(runs: dict[Key, Figures]) -> None:
    """Print the medians, and muster's place among them."""
    for cell in cells_of(runs):
        names = [name for name in policies_of(runs) if any(k[:2] == (cell, name) for k in runs)]
        seeds = len({seed for c, _, seed in runs if c == cell})
        print(f"\n{cell}: medians of {seeds} seeds; noise: (max - min) / median of mean JCT")
        heads = [key.removesuffix("_share").removesuffix("_tokens")[:14] for key in KEYS]
        print(f"  {'':<14}" + "".join(f"{head:>15}" for head in (*heads, "noise")))
        rows = {name: medians(runs, cell, name) for name in names}
        for name, row in rows.items():
            print(f"  {name:<14}" + "".join(f"{value:>15.3f}" for value in row.values()))
        if "muster" in rows:
            print("  muster: " + ", ".join(_ratios(rows)))


def _ratios(rows: dict[str, dict[str, float]]) -> list[str]:
    muster = rows["muster"]
    found = []
    for name, row in rows.items():
        if name != "muster":
            jct = muster["jct_mean_s"] / row["jct_mean_s"]
            makespan = muster["makespan_s"] / row["makespan_s"]
            found.append(f"{jct:.2f} x JCT and {makespan:.2f} x makespan of {name}")
    return [*found, f"hit {muster['prefix_hit'] / muster['attainable_hit']:.2f} of attainable"]


def main() -> None:
    """Run what is missing and print the report."""
    given = _arguments()
    model = EngineModel()
    if given.blocks:
        model = replace(model, num_blocks=given.blocks)
    setting = Setting(given.engine, model, given.data_dir, given.time_scale)
    wanted: list[Key] = []
    for cell in given.cells:
        names = given.policies or policies_for(cell)
        wanted += [(cell, name, seed) for seed in given.seeds for name in names]
    journal = Journal(given.json, again=given.again)
    asyncio.run(run_all(journal, wanted, setting))
    runs = {key: journal.runs[key] for key in wanted}
    print_report(runs)
    if given.plot:
        save_bars(runs, given.plot)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Any = parser.add_argument
    add("--engine", choices=("vllm", "simulated"), default="vllm")
    add("--cells", nargs="+", default=CELLS, help='such as "3 2k 4x closed"; see bench.grid')
    add("--seeds", nargs="+", type=int, default=SEEDS)
    add("--policies", nargs="+", help="instead of those that belong to each cell")
    add("--again", nargs="*", default=(), metavar="POLICY", help="forget runs of these policies")
    add("--blocks", type=int, help="KV blocks of the small cache; the cells count on 400")
    add("--time-scale", type=float, default=1.0, help="wall seconds per second; simulated only")
    add("--data-dir", type=Path, default=Path(".muster"), help="where the prepared model is kept")
    add("--json", type=Path, help="one file per engine: keep each run, and take up from here")
    add("--plot", type=Path, help="an image file (needs the `bench` extra)")
    given = parser.parse_args()
    if given.engine == "vllm" and given.time_scale != 1.0:
        parser.error("a real engine takes its own time: --time-scale is for the simulated one")
    return given


if __name__ == "__main__":
    main()
