"""Random plans of all kinds of nodes, and a world in which their work is done in any order."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from contracts.plan import MapNode, Plan, ToolNode
from workflows.plan_graph import values_of
from workflows.plan_progress import Progress
from workflows.plan_state import BodyState, NodePath, shown


def random_plan(rng: random.Random, most: int) -> Plan:
    """Return a plan of at most `most` nodes that passes the check, mostly tools."""
    nodes: dict[str, Any] = {}
    sure: list[str] = []
    """Nodes that are never skipped, so that all may refer to them."""
    while len(nodes) < most:
        number = len(nodes)
        name = f"n{number}"
        kind = rng.choices(
            ["tool", "branch", "map", "join", "fallback", "skip"], [10, 1, 1, 1, 1, 1]
        )[0]
        if kind == "branch" and number + 4 <= most and sure:
            nodes |= _branch(rng, name, sure)
            sure.append(f"{name}j")
        elif kind == "map" and number + 3 <= most:
            nodes[name] = _map(rng, name, sure)
            sure.append(name)
        elif kind == "join" and sure:
            nodes[name] = {"join": rng.sample(sure, min(len(sure), rng.randint(1, 3)))}
            sure.append(name)
        elif kind == "fallback" and number + 2 <= most:
            nodes[name] = tool(rng, sure, fails=True) | {"fallback": f"{name}f"}
            nodes[f"{name}f"] = tool(rng, sure)
            sure.append(name)
        elif kind == "skip" and number + 3 <= most:
            nodes[name] = tool(rng, sure, fails=True) | {"on_failure": "skip"}
            nodes[f"{name}s"] = {"tool": "t", "arguments": {"of": f"${{{name}}}"}}
            nodes[f"{name}j"] = {"join": [name, f"{name}s"]}
            sure.append(f"{name}j")
        else:
            nodes[name] = tool(rng, sure)
            sure.append(name)
    return Plan.model_validate(
        {
            "name": "random",
            "tools": [{"function": "a.b:t"}],
            "nodes": nodes,
            "max_parallel": rng.choice([1, 3, 64]),
        }
    )


def tool(rng: random.Random, sure: list[str], *, fails: bool = False) -> dict[str, Any]:
    """A tool node that refers to some of what is there."""
    of = [f"${{{name}}}" for name in rng.sample(sure, min(len(sure), rng.randint(0, 3)))]
    return {"tool": "t", "arguments": {"of": [*of, "$${x}"], "fails": fails}}


def _branch(rng: random.Random, name: str, sure: list[str]) -> dict[str, Any]:
    """A branch on a number, its two ways, and what joins them."""
    test = rng.choice([{"above": 0}, {"equals": -1}])
    return {
        name: {
            "branch": rng.choice([-1, 1]), "after": [rng.choice(sure)],
            "cases": [{**test, "then": f"{name}a"}], "otherwise": f"{name}b",
        },
        f"{name}a": tool(rng, sure),
        f"{name}b": tool(rng, sure),
        f"{name}j": {"join": [f"{name}a", f"{name}b"], "first": True},
    }  # fmt: skip


def _map(rng: random.Random, name: str, sure: list[str]) -> dict[str, Any]:
    inner: dict[str, Any] = {f"{name}x": tool(rng, sure)}
    inner[f"{name}x"]["arguments"]["item"] = "${item}"
    inner[f"{name}y"] = {"tool": "t", "arguments": {"of": f"${{{name}x}}"}}
    if rng.random() < 0.3:
        inner[f"{name}y"] = {
            "map": ["${index}", 7],
            "do": {f"{name}z": {"tool": "t", "arguments": {"of": [f"${{{name}x}}", "${item}"]}}},
        }
    return {"map": list(range(rng.randint(0, 5))), "do": inner, "width": rng.randint(1, 3)}


@dataclass
class Trace:
    """What happened to a plan: its output, and each node that ran, with what it was given."""

    output: Any = None
    begun: Counter[str] = field(default_factory=Counter)
    done: dict[str, Any] = field(default_factory=dict)
    widest: int = 0
    restarts: int = 0


def play(plan: Plan, rng: random.Random, *, restarts: bool = False) -> Trace:
    """Do a plan's work in an order that `rng` chooses, perhaps with restarts from its state."""
    root, trace = BodyState(), Trace()
    progress = Progress(plan, root, {})
    while True:
        while (path := progress.take()) is not None:
            trace.begun[shown(path)] += 1
        if progress.is_over:
            break
        assert progress.running, f"stuck: {shown_state(root)}"
        assert len(progress.running) == plan.max_parallel or not progress.has_ready
        trace.widest = max(trace.widest, len(progress.running))
        if restarts and rng.random() < 0.2:
            for path in progress.running:
                trace.begun[shown(path)] -= 1
            root = BodyState.model_validate_json(root.model_dump_json())
            held = progress.held_bytes
            progress = Progress(plan, root, {})
            assert progress.held_bytes == held
            trace.restarts += 1
            continue
        _do(progress, rng.choice(list(progress.running)), trace)
    assert progress.failure is None
    trace.output = progress.output()
    return trace


def shown_state(root: BodyState) -> str:
    """Return how the nodes stand, in short."""
    return " ".join(f"{name}={node.status}" for name, node in root.nodes.items())[:2_000]


def _do(progress: Progress, path: NodePath, trace: Trace) -> None:
    node = progress.node(path)
    assert isinstance(node, ToolNode)
    given: Any = {key: progress.filled(path, value) for key, value in values_of(node).items()}[
        "arguments"
    ]
    if given.get("fails"):
        progress.fail(path, "it was told to")
        return
    trace.done[shown(path)] = given
    # Short, but it says what was given: were an input missing, the results would differ.
    progress.finish(path, [path[-1], hash_of(given)])


def hash_of(value: Any) -> int:
    """Return a small number that stands for a JSON value."""
    return random.Random(repr(value)).randrange(10**6)


def widest_of(plan: Plan) -> int:
    """Return how many nodes of a plan of one map with one node in it may run at a time."""
    [node] = plan.nodes.values()
    assert isinstance(node, MapNode)
    assert isinstance(node.map, list)
    return min(plan.max_parallel, node.width, len(node.map))
