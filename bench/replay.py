"""Real agent traces, replayed in a closed loop: sizes, gaps and prefixes of sessions that happened.

`python -m bench.replay --traces DIR [--scale 10] [--think-scale 10] [--copies 4]` replays each
session of DIR (see the README there) as often as `--copies` says. Tokens are divided by `--scale`,
gaps by `--think-scale`; both stand in every result. Two runs: with gaps as recorded, and capped at
`--cap` seconds (before scaling). Copies share their system prompt and tool schemas, nothing else,
and start at random within the first `--spread` seconds.

What a trace does not say is taken so: a context that grows keeps all of what came before; one that
shrinks (a compaction) keeps what its block hashes say. A gap before a person's text is told to the
scheduler as idle, any other as a tool. A sub-agent is a session of its own from its recorded start.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.grid_report import print_cells
from bench.journal import Journal, Key
from bench.live import LiveLoop
from bench.live_engine import live_engine
from bench.plot import save_bars
from bench.policy import Plain, named_policy
from bench.workload import unlimited
from bench.world.engine import EngineModel
from bench.world.metric import Metrics
from bench.world.plan import PERSON, SessionPlan, StepPlan
from bench.world.world import World

POLICIES = (
    "plain",
    "priority",
    "requests:8",
    *(f"sessions:{cap}" for cap in (2, 3, 4, 6, 8, 12)),
    "muster",
    "bound",
)
TRACE_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Scaling:
    """How traces are made smaller. `cap_s` bounds a gap before it is scaled; None does not."""

    tokens: float = 10.0
    think: float = 10.0
    cap_s: float | None = None

    @property
    def name(self) -> str:
        """What stands in every result."""
        cap = "uncapped" if self.cap_s is None else f"capped at {self.cap_s:g} s"
        return f"tokens/{self.tokens:g}, gaps/{self.think:g} {cap}"

    def count(self, tokens: int) -> int:
        """Return a number of tokens, scaled, at least 1."""
        return max(1, round(tokens / self.tokens))

    def gap_s(self, think_s: float) -> float:
        """Return a gap, capped and scaled."""
        return min(think_s, self.cap_s if self.cap_s is not None else think_s) / self.think


def read_sessions(trace: dict[str, Any], scaling: Scaling) -> list[SessionPlan]:
    """Return a trace's session and those of its sub-agents."""
    main = [request for request in trace["requests"] if request["type"] == "n"]
    found = [_session(trace["id"], trace, main, scaling)]
    for request in trace["requests"]:
        if request["type"] == "subagent":
            name = f"{trace['id']}-{request['agent_id']}"
            plan = _session(name, request, request["requests"], scaling)
            kind = f"{trace['id']}-{request['subagent_type']}"
            found.append(replace(plan, opening=kind, arrival_s=request["t"] / scaling.think))
    return found


def _session(
    name: str, head: dict[str, Any], requests: Sequence[dict[str, Any]], scaling: Scaling
) -> SessionPlan:
    steps: list[StepPlan] = []
    tokens = 0
    for index, request in enumerate(requests):
        size, keep = scaling.count(request["in"]), None
        if index and request["in"] < requests[index - 1]["in"]:
            keep = min(size - 1, _shared_tokens(requests[index - 1], request, scaling))
            tokens = keep
        output = scaling.count(request["out"])
        new_tokens = max(1, size - tokens)
        tool, gap_s = "", 0.0
        if index + 1 < len(requests):
            after = requests[index + 1]
            tool = "tool" if "tool_result" in after["input_types"] else PERSON
            gap_s = scaling.gap_s(after["think_time"])
        steps.append(StepPlan(new_tokens, output, tool, gap_s, keep_tokens=keep))
        tokens += new_tokens + output
    shared = scaling.count(head["tool_tokens"] + head["system_tokens"])
    shared = min(shared, steps[0].new_tokens)
    return SessionPlan(name, tuple(steps), opening=name, shared_tokens=shared)


def _shared_tokens(before: dict[str, Any], after: dict[str, Any], scaling: Scaling) -> int:
    """Return how much of a prompt the next one begins with, by the trace's block hashes."""
    pairs = zip(before["hash_ids"], after["hash_ids"], strict=False)
    blocks = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return scaling.count(blocks * TRACE_BLOCK)


def make_copies(
    plans: Sequence[SessionPlan], copies: int, spread_s: float, seed: int
) -> list[SessionPlan]:
    """Return each session that many times, each copy at a random time of its own."""
    rng = random.Random(seed)
    found = [
        replace(
            plan, name=f"{plan.name}#{copy}", arrival_s=plan.arrival_s + rng.random() * spread_s
        )
        for copy in range(copies)
        for plan in plans
    ]
    return sorted(found, key=lambda plan: plan.arrival_s)


def simulate(plans: list[SessionPlan], policy: str, model: EngineModel) -> Metrics:
    """Replay in virtual time."""
    if policy == "bound":
        return World(plans, Plain, unlimited(model, plans)).run()
    return World(plans, named_policy(policy), model).run()


async def run_live(
    plans: list[SessionPlan], policy: str, model: EngineModel, data_dir: Path
) -> Metrics:
    """Replay on real vLLM."""
    if policy == "bound":
        model, policy = unlimited(model, plans), "plain"
    async with live_engine("vllm", model, data_dir=data_dir) as live:
        make = named_policy(policy)
        loop = LiveLoop(plans, make, live.engine, live.capacity, vocabulary=live.vocabulary)
        return await loop.run(limit_s=86_400.0)


def main() -> None:
    """Replay what is missing and print the figures."""
    given = _arguments()
    model = EngineModel(max_model_len=400 * 32)
    journal = Journal(given.json, again=given.again)
    wanted: list[Key] = []
    files = sorted(given.traces.glob("*.json"))
    traces = [json.loads(file.read_text()) for file in files]
    for cap_s in (given.cap, None):
        scaling = Scaling(given.scale, given.think_scale, cap_s)
        sessions = [plan for trace in traces for plan in read_sessions(trace, scaling)]
        blocks = sum(plan.unique_blocks(model.block_size) for plan in sessions) * given.copies
        pressure = blocks / model.num_blocks
        cell = f"{scaling.name}, {given.copies} copies, {pressure:.1f}x, {given.engine}"
        for seed, policy in itertools.product(given.seeds, given.policies):
            key = (cell, policy, seed)
            wanted.append(key)
            if key in journal:
                continue
            plans = make_copies(sessions, given.copies, given.spread, seed)
            if given.engine == "simulated":
                metrics = simulate(plans, policy, model)
            else:
                metrics = asyncio.run(run_live(plans, policy, model, given.data_dir))
            journal.add(key, metrics.as_dict())
    runs = {key: journal.runs[key] for key in wanted}
    print_cells(runs, every=True)
    if given.plot:
        save_bars(runs, given.plot)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Any = parser.add_argument
    add("--traces", type=Path, required=True)
    add("--scale", type=float, default=10.0, help="divides prompt and answer lengths")
    add("--think-scale", type=float, default=10.0, help="divides gaps")
    add("--cap", type=float, default=60.0, help="longest gap of the capped run, in seconds")
    add("--copies", type=int, default=4)
    add("--spread", type=float, default=60.0, help="seconds within which copies start")
    add("--engine", choices=("simulated", "vllm"), default="simulated")
    add("--data-dir", type=Path, default=Path(".muster"), help="where the prepared model is kept")
    add("--policies", nargs="+", default=POLICIES)
    add("--seeds", nargs="+", type=int, default=(1, 2, 3))
    add("--again", nargs="*", default=(), metavar="POLICY", help="forget runs of these policies")
    add("--json", type=Path, help="keep each run here, and take up from here")
    add("--plot", type=Path, help="an image file (needs the `bench` extra)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
