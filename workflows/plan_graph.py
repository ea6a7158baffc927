"""A plan as a graph: what each node waits for, what waits for it, and what its skip takes along.

A body is the plan itself or the `do` of a map; a node waits for nodes of its own body alone. What
the nodes in a map refer to outside of it, the map waits for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter

from pydantic import JsonValue

from contracts.plan import (
    AgentNode,
    ApprovalNode,
    BranchNode,
    JoinNode,
    LLMNode,
    MapNode,
    Node,
    Plan,
    ToolNode,
)
from workflows.reference import Reference, Step, parse_text, texts

INPUT, ITEM, INDEX = "input", "item", "index"
RESERVED = (INPUT, ITEM, INDEX)

Place = tuple[Step, ...]
"""Where in a node a value stands, as in ("arguments", "city")."""


def values_of(node: Node) -> dict[str, JsonValue]:
    """Return what of a node may hold references, by its key; of a map, `do` aside."""
    match node:
        case LLMNode():
            return {"llm": node.llm, "instructions": node.instructions}
        case ToolNode():
            return {"arguments": node.arguments}
        case ApprovalNode():
            return {"approval": node.approval}
        case AgentNode():
            return {"task": node.task}
        case BranchNode():
            return {"branch": node.branch}
        case MapNode():
            return {"map": node.map}
        case JoinNode():
            return {}


def references(value: JsonValue, place: Place = ()) -> Iterator[tuple[Place, Reference]]:
    """Yield the references in a value with their places; raises BadReferenceError."""
    for path, text in texts(value, place):
        for part in parse_text(text):
            if isinstance(part, Reference):
                yield path, part


def names_in(value: JsonValue) -> list[str]:
    """Return the names that a value refers to, each once."""
    return list(dict.fromkeys(reference.name for _, reference in references(value)))


def all_nodes(nodes: Mapping[str, Node]) -> Iterator[tuple[str, Node]]:
    """Yield the nodes of a body and of the maps in it, with their names."""
    for name, node in nodes.items():
        yield name, node
        if isinstance(node, MapNode):
            yield from all_nodes(node.do)


def targets(node: BranchNode) -> list[str]:
    """Return the nodes that a branch chooses among, each once."""
    ways = [case.then for case in node.cases]
    return list(dict.fromkeys([*ways, node.otherwise] if node.otherwise else ways))


@dataclass(frozen=True)
class Body:
    """The nodes of one body, and how they hang together.

    A node runs once all of its `needs` have ended; it is skipped if one of its `required` was.
    `sinks` are the nodes whose value no other takes. Values of `kept` nodes outlive their
    followers. `outer` are the names outside of the body that it refers to.
    """

    nodes: Mapping[str, Node]
    gives: JsonValue
    needs: Mapping[str, tuple[str, ...]]
    required: Mapping[str, tuple[str, ...]]
    followers: Mapping[str, tuple[str, ...]]
    branch_of: Mapping[str, str]
    fallback_of: Mapping[str, str]
    sinks: tuple[str, ...]
    kept: frozenset[str]
    bodies: Mapping[str, Body]
    outer: tuple[str, ...]

    def order(self) -> tuple[str, ...]:
        """Return the nodes so that each stands after its needs; raises graphlib.CycleError."""
        return tuple(TopologicalSorter(self.needs).static_order())

    def chain(self, name: str) -> list[str]:
        """Return a node, its fallback, that one's fallback, and so on."""
        found = [name]
        while (after := self.nodes[found[-1]].fallback) and after not in found:
            found.append(after)
        return found


def graph_of(plan: Plan) -> Body:
    """Return a plan's graph; it has no cycle and names only what is there, if the plan is checked.

    Raises BadReferenceError for a reference that cannot be read.
    """
    return body_of(plan.nodes, plan.output)


def body_of(nodes: Mapping[str, Node], gives: JsonValue) -> Body:
    """Return the graph of one body."""
    bodies = {
        name: body_of(node.do, node.gives)
        for name, node in nodes.items()
        if isinstance(node, MapNode)
    }
    referred = {name: _referred(name, node, bodies) for name, node in nodes.items()}
    required = {
        name: tuple(dict.fromkeys(each for each in (*referred[name], *node.after) if each in nodes))
        for name, node in nodes.items()
    }
    branch_of = {
        target: name
        for name, node in nodes.items()
        if isinstance(node, BranchNode)
        for target in targets(node)
        if target in nodes
    }
    fallback_of = {node.fallback: name for name, node in nodes.items() if node.fallback in nodes}
    body = Body(
        nodes, gives, {}, required, {}, branch_of,
        {fallback: name for fallback, name in fallback_of.items() if fallback is not None},
        (), frozenset(), bodies, (),
    )  # fmt: skip
    needs = {name: _needs(body, name) for name in nodes}
    followers: dict[str, list[str]] = {name: [] for name in nodes}
    for name, all_needed in needs.items():
        for needed in all_needed:
            followers[needed].append(name)
    sinks = _sinks(body, referred)
    given = [name for name in names_in(gives) if name in nodes] if gives is not None else sinks
    outer = [name for name in names_in(gives) if name not in nodes]
    outer += [each for names in referred.values() for each in names if each not in nodes]
    return Body(
        nodes, gives, needs, required, {key: tuple(all_) for key, all_ in followers.items()},
        branch_of, body.fallback_of, tuple(sinks),
        frozenset(each for name in given for each in body.chain(name)), bodies,
        tuple(dict.fromkeys(name for name in outer if name not in RESERVED)),
    )  # fmt: skip


def _referred(name: str, node: Node, bodies: Mapping[str, Body]) -> list[str]:
    found = [each for value in values_of(node).values() for each in names_in(value)]
    if isinstance(node, MapNode):
        found += bodies[name].outer
    return list(dict.fromkeys(found))


def _needs(body: Body, name: str) -> tuple[str, ...]:
    """Return all that a node waits for; whoever needs a node needs its fallbacks too."""
    node = body.nodes[name]
    first = [*body.required[name]]
    if isinstance(node, JoinNode):
        first += [each for each in node.join if each in body.nodes]
    if name in body.branch_of:
        first.append(body.branch_of[name])
    found = [each for needed in first for each in body.chain(needed)]
    if name in body.fallback_of:
        found.append(body.fallback_of[name])
    return tuple(dict.fromkeys(found))


def _sinks(body: Body, referred: Mapping[str, list[str]]) -> list[str]:
    taken = {each for names in referred.values() for each in names} | set(body.fallback_of)
    for node in body.nodes.values():
        if isinstance(node, JoinNode):
            taken.update(node.join)
    return [
        name
        for name, node in body.nodes.items()
        if name not in taken and not isinstance(node, BranchNode)
    ]
