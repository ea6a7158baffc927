"""What the scheduler costs as sessions grow ten- and a hundredfold, and over many replicas.

`python -m bench.scale [--json FILE] [--plot FILE]` measures, in the simulated world:

- CPU time per scheduler event, receive and schedule together, with 100, 1,000 and 10,000 live
  sessions. The cache grows with them (pressure 2), a session that ends is followed by another, the
  engine is one large GPU's. Wakes without an event count to the next event.
- Memory of a scheduler alone that knows 10,000 waiting sessions of 50 messages.
- 10,000 sessions over 1 to 64 replicas: one scheduler and one engine each, sessions hashed to them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import time
import tracemalloc
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.plot import panels
from bench.policy import named_policy
from bench.workload import TOOLS
from bench.world.engine import EngineModel
from bench.world.metric import mean, percentile
from bench.world.plan import SessionPlan, StepPlan
from bench.world.world import World
from inference_service.engine.simulation import CostModel
from inference_service.scheduler.decision import Decision, Dispatch
from inference_service.scheduler.event import (
    CapacityChanged,
    Event,
    FirstToken,
    Node,
    StepFinished,
    StepReady,
    ToolsStarted,
)
from inference_service.scheduler.protocol import Scheduler

GPU = CostModel(step_s=0.006, prefill_token_s=0.000_02, decode_seq_s=0.000_05)
PRESSURE = 2
TOKENS = (512, 1_536)
MESSAGES = 50


class EnoughError(Exception):
    """As many events were told as were wanted."""


@dataclass(slots=True)
class Timed:
    """A scheduler with a stopwatch: CPU seconds per event, a batch's time shared by its events."""

    scheduler: Scheduler
    limit: int
    costs_s: list[float] = field(default_factory=list[float])
    _batch_s: float = 0.0
    _batch: int = 0

    def receive(self, event: Event, now: float) -> None:
        """Tell an event."""
        start_s = time.perf_counter()
        self.scheduler.receive(event, now)
        self._batch_s += time.perf_counter() - start_s
        self._batch += 1

    def schedule(self, now: float) -> list[Decision]:
        """Ask what is to be done."""
        start_s = time.perf_counter()
        decisions = self.scheduler.schedule(now)
        self._batch_s += time.perf_counter() - start_s
        if self._batch:
            self.costs_s += [self._batch_s / self._batch] * self._batch
            self._batch_s, self._batch = 0.0, 0
            if len(self.costs_s) >= self.limit:
                raise EnoughError
        return decisions

    def next_wake(self, now: float) -> float | None:
        """Ask when to ask again."""
        start_s = time.perf_counter()
        wake_s = self.scheduler.next_wake(now)
        self._batch_s += time.perf_counter() - start_s
        return wake_s


def session(number: int, rng: random.Random) -> SessionPlan:
    """Return a session of six steps on average, with tools of every speed."""
    count = rng.randint(4, 8)
    first, rest = rng.randint(*TOKENS) * 6 // 10, rng.randint(*TOKENS) * 4 // 10
    steps = []
    for index in range(count):
        tool = rng.choice(list(TOOLS)) if index < count - 1 else ""
        gap_s = rng.expovariate(1 / TOOLS[tool]) if tool else 0.0
        new_tokens = first if index == 0 else max(8, rest // (count - 1) - 40)
        steps.append(StepPlan(new_tokens, rng.randint(24, 64), tool, gap_s))
    return SessionPlan(f"s{number}", tuple(steps), shared_tokens=128)


def engine_for(plans: list[SessionPlan]) -> EngineModel:
    """Return a large GPU's engine with a cache for half of these sessions."""
    blocks = sum(plan.unique_blocks(32) for plan in plans)
    return EngineModel(
        num_blocks=max(256, blocks // PRESSURE),
        max_num_seqs=256,
        max_num_batched_tokens=8_192,
        cost=GPU,
    )


def cost(policy: str, sessions: int, events: int) -> dict[str, Any]:
    """Return the cost per event with that many live sessions."""
    rng = random.Random(sessions)
    plans = [session(number, rng) for number in range(sessions)]
    timed: list[Timed] = []

    def make(capacity: CapacityChanged) -> Scheduler:
        timed.append(Timed(named_policy(policy)(capacity), events))
        return timed[0]  # type: ignore[return-value] # the world needs no more of it

    def successor(now: float) -> SessionPlan:
        number = sessions + rng.randrange(1 << 60)
        plan = session(number, rng)
        return SessionPlan(plan.name, plan.steps, now, shared_tokens=plan.shared_tokens)

    world = World(plans, make, engine_for(plans), successor)
    with contextlib.suppress(EnoughError):
        world.run()
    costs_us = [cost_s * 1e6 for cost_s in timed[0].costs_s]
    return {
        "sessions": sessions,
        "events": len(costs_us),
        "virtual_s": world.now,
        "mean_us": mean(costs_us),
        "p50_us": percentile(costs_us, 0.5),
        "p99_us": percentile(costs_us, 0.99),
        "max_us": max(costs_us),
    }


def memory(policy: str, sessions: int) -> dict[str, Any]:
    """Return the bytes that a scheduler holds for waiting sessions of `MESSAGES` messages."""
    capacity = CapacityChanged(256, 1_000_000_000, 32, 1_000_000, 1_000_000)
    tracemalloc.start()
    scheduler = named_policy(policy)(capacity)
    for number in range(sessions):
        now = float(number)
        name, step_id = f"s{number}", f"s{number}/{MESSAGES - 1}"
        path = tuple(Node(f"{name}/{m}", 40 * (m + 1)) for m in range(MESSAGES))
        event = StepReady(step_id, name, path, 64, is_new=True, cached_tokens=0, job=name)
        scheduler.receive(event, now)
        assert Dispatch((step_id,)) in scheduler.schedule(now), policy
        end = event.prompt_tokens + 40
        for told in (
            FirstToken(step_id, 0),
            StepFinished(step_id, Node(step_id, end)),
            ToolsStarted(name, (f"tool{number % 50}",)),
        ):
            scheduler.receive(told, now)
        scheduler.schedule(now)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"sessions": sessions, "messages": MESSAGES, "mb": held / 1e6}


def replicas(policy: str, sessions: int, count: int) -> dict[str, Any]:
    """Run sessions over that many replicas; each gets those that hash to it."""
    rng = random.Random(sessions)
    plans = [session(number, rng) for number in range(sessions)]
    shares: list[list[SessionPlan]] = [[] for _ in range(count)]
    for plan in plans:
        shares[zlib.crc32(plan.name.encode()) % count].append(plan)
    model = engine_for(plans[: sessions // 64])
    start_s = time.process_time()
    runs = [World(share, named_policy(policy), model).run() for share in shares if share]
    steps = sum(run.steps for run in runs)
    makespan_s = max(run.makespan_s for run in runs)
    return {
        "replicas": count,
        "sessions": sum(run.sessions for run in runs),
        "makespan_s": makespan_s,
        "steps_per_s": steps / makespan_s,
        "prefix_hit": mean([run.prefix_hit for run in runs]),
        "attainable_hit": mean([run.attainable_hit for run in runs]),
        "cpu_ms_per_step": 1e3 * (time.process_time() - start_s) / steps,
    }


def main() -> None:
    """Measure and print all three."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", default="muster")
    parser.add_argument("--sessions", nargs="+", type=int, default=[100, 1_000, 10_000])
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--replicas", nargs="*", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="an image file (needs the `bench` extra)")
    given = parser.parse_args()
    figures: dict[str, Any] = {"policy": given.policy, "cost": [], "replicas": []}
    for sessions in given.sessions:
        figures["cost"].append(cost(given.policy, sessions, given.events))
        _print("cost per event", figures["cost"][-1])
    figures["memory"] = memory(given.policy, max(given.sessions))
    _print("memory", figures["memory"])
    for count in given.replicas:
        figures["replicas"].append(replicas(given.policy, max(given.sessions), count))
        _print("replicas", figures["replicas"][-1])
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    if given.plot:
        save_plot(figures, given.plot)


def save_plot(figures: dict[str, Any], path: Path) -> None:
    """Draw the cost per event over the sessions, and the steps per second over the replicas."""
    with panels(path, 2) as (costs, rates):
        sessions = [row["sessions"] for row in figures["cost"]]
        for key in ("mean_us", "p50_us", "p99_us"):
            costs.plot(sessions, [row[key] for row in figures["cost"]], "o-", label=key)
        costs.set_xlabel("live sessions")
        costs.set_ylabel("microseconds per event")
        costs.legend()
        counts = [row["replicas"] for row in figures["replicas"]]
        rates.plot(counts, [row["steps_per_s"] for row in figures["replicas"]], "o-")
        rates.set_xlabel("replicas")
        rates.set_ylabel("steps per virtual second")
        for axes in (costs, rates):
            axes.set_xscale("log")
            axes.set_yscale("log")


def _print(title: str, row: dict[str, Any]) -> None:
    cells = (f"{k} {v:,.3g}" if isinstance(v, float) else f"{k} {v:,}" for k, v in row.items())
    print(f"{title:<16}" + ", ".join(cells), flush=True)


if __name__ == "__main__":
    main()
