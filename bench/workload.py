"""Workloads of the grid: agents that share a system prompt, call tools and grow, from a seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import lru_cache

from bench.policy import Plain
from bench.world.engine import EngineModel
from bench.world.plan import NEVER_S, SessionPlan, StepPlan
from bench.world.world import World

TOOLS = {"0.1": 0.1, "3": 3.0, "30": 30.0}
"""Mean seconds of a tool call, by the tool's name."""
SIGMA = 0.5
"""Spread of a tool's time (lognormal)."""
CONTEXTS = {"0.5k": (512, 512), "2k": (2_048, 2_048), "mixed": (512, 4_096)}
"""Shortest and longest final context, in tokens; uniform between."""
STEPS = (3, 6)
OUTPUT_TOKENS = (24, 64)
MIN_RESULT_TOKENS = 8
SHARED = 0.25
"""The shared system prompt, as a part of the shortest final context."""
OPENED = 0.6
"""The first prompt, as a part of the final context (less, where the answers take too much)."""
NEVER = 0.05
"""Part of the sessions with a call that never returns, in a cell that has such."""
CACHE_BLOCKS = 400


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of workload. `tool` and `context` name rows of the tables, or say "mixed".

    `pressure`: the sessions' final unique blocks over the cache's blocks. Arrivals are "closed"
    (all at 0) or "poisson", spread over about half of what a closed start would take.
    """

    tool: str = "3"
    context: str = "2k"
    pressure: float = 4
    never: bool = False
    arrivals: str = "closed"

    def __post_init__(self) -> None:
        assert self.tool in (*TOOLS, "mixed"), self
        assert self.context in CONTEXTS, self
        assert self.arrivals in ("closed", "poisson"), self
        assert self.pressure > 0, self

    @property
    def name(self) -> str:
        """Name of the cell in tables, and its key in files."""
        never = "+never" if self.never else ""
        return f"{self.tool}{never} {self.context} {self.pressure:g}x {self.arrivals}"

    @classmethod
    def named(cls, name: str) -> Cell:
        """Return the cell of that name."""
        tool, context, pressure, arrivals = name.split()
        tool, _, never = tool.partition("+")
        return cls(tool, context, float(pressure.rstrip("x")), bool(never), arrivals)


def make_plans(cell: Cell, seed: int, model: EngineModel | None = None) -> list[SessionPlan]:
    """Return the sessions of a cell, the same for the same seed and engine."""
    return list(_plans(cell, seed, model or EngineModel()))


@lru_cache(maxsize=64)
def _plans(cell: Cell, seed: int, model: EngineModel) -> tuple[SessionPlan, ...]:
    # Cells that are equal have the same sessions, whether their pressure is 4 or 4.0.
    pressure = float(cell.pressure)
    rng = random.Random(f"{cell.tool}/{cell.context}/{pressure}/{cell.never}/{seed}")
    shared = round(SHARED * CONTEXTS[cell.context][0])
    wanted = cell.pressure * CACHE_BLOCKS - shared // model.block_size
    plans: list[SessionPlan] = []
    while wanted > 0:
        plans.append(_session(cell, len(plans), shared, rng))
        wanted -= plans[-1].unique_blocks(model.block_size)
    if cell.never:
        for index in rng.sample(range(len(plans)), max(1, round(NEVER * len(plans)))):
            plans[index] = _without_end(plans[index], rng)
    if cell.arrivals == "poisson":
        plans = _spread(plans, poisson_rate(plans, model), rng)
    return tuple(plans)


def poisson_rate(plans: list[SessionPlan], model: EngineModel) -> float:
    """Return sessions per second: all come in half of the makespan of an unlimited cache."""
    return len(plans) / (0.5 * World(plans, Plain, unlimited(model, plans)).run().makespan_s)


def unlimited(model: EngineModel, plans: list[SessionPlan]) -> EngineModel:
    """Return the same engine with a cache that holds all sessions to their ends."""
    return replace(model, num_blocks=sum(-(-p.final_tokens // model.block_size) for p in plans) + 1)


def _session(cell: Cell, number: int, shared: int, rng: random.Random) -> SessionPlan:
    final = rng.randint(*CONTEXTS[cell.context])
    count = rng.randint(*STEPS)
    outputs = [rng.randint(*OUTPUT_TOKENS) for _ in range(count)]
    room = final - sum(outputs)
    results = MIN_RESULT_TOKENS * (count - 1)
    opened = max(min(round(OPENED * final), room - results), shared + MIN_RESULT_TOKENS)
    new_tokens = [opened, *_split(max(room - opened, results), count - 1, rng)]
    steps = []
    for index in range(count):
        tool = "" if index == count - 1 else _tool(cell, rng)
        gap_s = _gap_s(tool, rng) if tool else 0.0
        steps.append(StepPlan(new_tokens[index], outputs[index], tool, gap_s))
    return SessionPlan(f"s{number}", tuple(steps), shared_tokens=shared)


def _split(total: int, parts: int, rng: random.Random) -> list[int]:
    """Return `parts` uneven sizes of tool results with that sum."""
    weights = [rng.uniform(0.5, 1.5) for _ in range(parts)]
    spare = total - MIN_RESULT_TOKENS * parts
    sizes = [MIN_RESULT_TOKENS + int(spare * weight / sum(weights)) for weight in weights]
    sizes[-1] += total - sum(sizes)
    return sizes


def _tool(cell: Cell, rng: random.Random) -> str:
    return rng.choice(list(TOOLS)) if cell.tool == "mixed" else cell.tool


def _gap_s(tool: str, rng: random.Random) -> float:
    return rng.lognormvariate(math.log(TOOLS[tool]) - SIGMA**2 / 2, SIGMA)


def _without_end(plan: SessionPlan, rng: random.Random) -> SessionPlan:
    """Let one of its tools hang; it looks like any other call."""
    steps = list(plan.steps)
    index = rng.randrange(len(steps) - 1)
    steps[index] = replace(steps[index], gap_s=NEVER_S)
    return replace(plan, steps=tuple(steps))


def _spread(plans: list[SessionPlan], rate: float, rng: random.Random) -> list[SessionPlan]:
    now, spread = 0.0, []
    for plan in plans:
        now += rng.expovariate(rate)
        spread.append(replace(plan, arrival_s=now))
    return spread
