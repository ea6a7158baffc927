"""What is wrong with a plan, found before anything of it runs: one error that names node and place.

First the names, then how nodes hang together, then whether what they refer to can be there
(`plan_type`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError

from pydantic import JsonValue
from pydantic_core import to_json

from contracts.agent import SubAgent, ToolRef, UsePolicy
from contracts.error import LimitExceededError
from contracts.limit import (
    MAX_AGENT_DEPTH,
    MAX_MAP_DEPTH,
    MAX_PLAN_BYTES,
    MAX_PLAN_INPUT_BYTES,
    MAX_PLAN_NODES,
)
from contracts.plan import (
    AgentNode,
    BranchNode,
    JoinNode,
    MapNode,
    Node,
    NodeFailure,
    Plan,
    ToolNode,
)
from workflows.plan_graph import (
    INDEX,
    INPUT,
    ITEM,
    RESERVED,
    Body,
    Place,
    graph_of,
    references,
    targets,
    values_of,
)
from workflows.plan_place import PlanError, PlanPlace
from workflows.plan_type import check_types
from workflows.reference import BadReferenceError, Reference
from workflows.schema import misfit

MAX_NAMES_IN_HINT = 20

_AGENTS_ONLY = ("after", "max_calls", "on_failure")
"""Policies of a tool by which a model is led; in a plan, nodes have their own."""


def check_plan(plan: Plan) -> None:
    """Raise what is wrong with a plan: `PlanError` or `LimitExceededError`."""
    if (size := len(to_json(plan))) > MAX_PLAN_BYTES:
        raise LimitExceededError(
            f"plan {plan.name!r}, as JSON,", size, MAX_PLAN_BYTES, "bytes",
            hint="leave large texts to the input or to tools",
        )  # fmt: skip
    _check_callables(plan)
    _check_names(plan)
    root = PlanPlace()
    _check_body(plan.nodes, root, around={})
    _check_value(plan.output, root.at("output"), plan.nodes, around={}, extra=(INPUT,))
    if not any(tool.is_server for tool in plan.tools):
        check_tools(plan, (*plan.tools, *plan.agents))
    graph = graph_of(plan)
    _check_order(graph, root)
    _check_output(graph, root)
    check_types(plan, graph)


def check_plan_input(plan: Plan, given: Mapping[str, JsonValue]) -> None:
    """Raise what is wrong with the input of a plan: `PlanError` or `LimitExceededError`."""
    size = len(to_json(given))
    if size > MAX_PLAN_INPUT_BYTES:
        raise LimitExceededError(
            "the plan's input, as JSON,", size, MAX_PLAN_INPUT_BYTES, "bytes",
            hint="name what is large, and let a tool read it",
        )  # fmt: skip
    if problem := misfit(plan.input, dict(given), "the input"):
        raise PlanError(("input",), f"plan {plan.name!r}: {problem}", hint="see the plan's `input`")


def _check_callables(plan: Plan) -> None:
    """Check the tools and agents of a plan, whoever calls them."""
    seen: set[str] = set()
    callables: tuple[ToolRef | SubAgent, ...] = (*plan.tools, *plan.agents)
    for number, each in enumerate(callables):
        is_tool = isinstance(each, ToolRef)
        place = ("tools", number) if is_tool else ("agents", number - len(plan.tools))
        name = each.shown if isinstance(each, ToolRef) else each.name
        for policy in _AGENTS_ONLY:
            if getattr(each, policy) != UsePolicy.model_fields[policy].default:
                raise PlanError(
                    (*place, policy),
                    f"{'tool' if is_tool else 'agent'} {name!r}: `{policy}` leads a model, and a "
                    f"plan's nodes are led by the plan",
                    hint="its nodes have `after` and `on_failure` of their own",
                )
        if each.tool_name in seen and each.tool_name:
            raise PlanError(
                (*place, "name"), f"two tools or agents are named {each.tool_name!r}",
                hint="give one of them another `name`",
            )  # fmt: skip
        seen.add(each.tool_name)
        if isinstance(each, SubAgent) and each.agent.depth >= MAX_AGENT_DEPTH:
            raise PlanError(
                place,
                f"agent {name!r}: with the plan, agents call agents {1 + each.agent.depth} levels "
                f"deep, the limit is {MAX_AGENT_DEPTH}",
            )


def _bodies(
    nodes: Mapping[str, Node], place: PlanPlace
) -> Iterator[tuple[Mapping[str, Node], PlanPlace]]:
    yield nodes, place
    for name, node in nodes.items():
        if isinstance(node, MapNode):
            yield from _bodies(node.do, place.body(name))


def _check_names(plan: Plan) -> None:
    seen: dict[str, PlanPlace] = {}
    for nodes, place in _bodies(plan.nodes, PlanPlace()):
        if place.depth > MAX_MAP_DEPTH:
            raise place.error(f"maps in maps, {place.depth} levels; the limit is {MAX_MAP_DEPTH}")
        for name in nodes:
            at = place.node(name)
            if name in RESERVED:
                raise at.error(
                    "the name is taken: it stands for what the plan or a map gives",
                    hint=f"name it otherwise than {', '.join(RESERVED)}",
                )
            if name in seen:
                raise at.error(
                    f"the name is used twice, for {seen[name].shown!r} too",
                    hint="names are unique over the plan and its maps",
                )
            seen[name] = at
    if len(seen) > MAX_PLAN_NODES:
        raise LimitExceededError(f"plan {plan.name!r}", len(seen), MAX_PLAN_NODES, "nodes",
                                 hint="let a `map` do what is alike")  # fmt: skip


def _check_body(nodes: Mapping[str, Node], place: PlanPlace, around: Mapping[str, Node]) -> None:
    """Check that everything the nodes of a body name is there; `around` are those outside."""
    extra = (INPUT, ITEM, INDEX) if place.depth else (INPUT,)
    fallbacks: dict[str, str] = {}
    for name, node in nodes.items():
        at = place.node(name)
        for key, value in values_of(node).items():
            _check_value(value, at.at(key), nodes, around, extra, failed=_failed(nodes, name))
        for step, named in _named(node):
            _check_named(named, at.at(*step), nodes, name)
        if node.fallback and (other := fallbacks.setdefault(node.fallback, name)) != name:
            raise at.at("fallback").error(f"{node.fallback!r} is the fallback of {other!r} too")
        if isinstance(node, MapNode):
            _check_body(node.do, place.body(name), {**around, **nodes})
            _check_value(
                node.gives, at.at("gives"), node.do, {**around, **nodes}, (INPUT, ITEM, INDEX)
            )
    _check_branches(nodes, place)


def _failed(nodes: Mapping[str, Node], name: str) -> frozenset[str]:
    """Return the nodes that have failed when `name` runs, since it is their fallback."""
    found = {each for each, node in nodes.items() if node.fallback == name}
    return frozenset(found)


def _named(node: Node) -> Iterator[tuple[Place, str]]:
    """Yield the nodes that a node names without a reference, with the places."""
    for place, name in enumerate(node.after):
        yield ("after", place), name
    if node.fallback:
        yield ("fallback",), node.fallback
    if isinstance(node, JoinNode):
        for place, name in enumerate(node.join):
            yield ("join", place), name
    if isinstance(node, BranchNode):
        for place, case in enumerate(node.cases):
            yield ("cases", place, "then"), case.then
        if node.otherwise:
            yield ("otherwise",), node.otherwise


def _check_named(named: str, at: PlanPlace, nodes: Mapping[str, Node], name: str) -> None:
    if named not in nodes:
        raise at.error(f"there is no node {named!r} {_here(at)}", hint=_there(nodes))
    if named == name:
        raise at.error("it names the node itself")
    if at.place[0] != "fallback":
        _refuse_fallback(named, at, nodes)


def _refuse_fallback(named: str, at: PlanPlace, nodes: Mapping[str, Node]) -> None:
    for other, node in nodes.items():
        if node.fallback == named:
            raise at.error(
                f"{named!r} is the fallback of {other!r}, and its value stands for that one's",
                hint=f"name {other!r} instead",
            )


def _check_value(
    value: JsonValue,
    at: PlanPlace,
    nodes: Mapping[str, Node],
    around: Mapping[str, Node],
    extra: Sequence[str],
    failed: frozenset[str] = frozenset(),
) -> None:
    """Check the references in one value: they can be read, and name what is there."""
    try:
        found = list(references(value))
    except BadReferenceError as error:
        raise at.error(error.message, hint=error.hint) from None
    for place, reference in found:
        here, name = at.at(*at.place, *place), reference.name
        if name in nodes or name in around:
            _refuse_fallback(name, here, {**around, **nodes})
        elif name not in extra:
            raise _missing(reference, here, {**around, **nodes}, extra)
        if name in failed:
            raise here.error(
                f"{reference}: {name!r} has failed when its fallback runs, and gives nothing"
            )
        if name == at.name:
            raise here.error(f"{reference}: the node refers to itself")


def _missing(
    reference: Reference, at: PlanPlace, known: Mapping[str, Node], extra: Sequence[str]
) -> PlanError:
    name = reference.name
    if name in (ITEM, INDEX):
        return at.error(f"{reference}: there is no {name} outside of a map",
                        hint="`item` and `index` are for the nodes in a map's `do`")  # fmt: skip
    for owner, node in known.items():
        if isinstance(node, MapNode) and any(name in inner for inner, _ in
                                             _bodies(node.do, PlanPlace())):  # fmt: skip
            return at.error(
                f"{reference}: {name!r} is inside of the map {owner!r}, it runs once for each item",
                hint=f"refer to {owner!r}, the list of what its items give; see `gives`",
            )
    return at.error(f"{reference}: there is no node {name!r}", hint=_there(known, extra))


def _there(nodes: Mapping[str, Node], extra: Sequence[str] = ()) -> str:
    names = [*extra, *nodes]
    more = ", …" if len(names) > MAX_NAMES_IN_HINT else ""
    return f"there are {', '.join(names[:MAX_NAMES_IN_HINT])}{more}"


def _here(at: PlanPlace) -> str:
    return "in this map" if at.depth else "in the plan itself"


def check_tools(plan: Plan, callables: Sequence[ToolRef | SubAgent]) -> None:
    """Check that all tools and agents that nodes name are there; those of servers are known now."""
    for nodes, place in _bodies(plan.nodes, PlanPlace()):
        for name, node in nodes.items():
            if isinstance(node, ToolNode):
                there = [each.tool_name for each in callables if isinstance(each, ToolRef)]
                _check_called("tool", node.tool, there, place.node(name))
            if isinstance(node, AgentNode):
                there = [each.tool_name for each in callables if isinstance(each, SubAgent)]
                _check_called("agent", node.agent, there, place.node(name))


def _check_called(kind: str, named: str, there: Sequence[str], at: PlanPlace) -> None:
    if named not in there:
        names = ", ".join(there[:MAX_NAMES_IN_HINT]) or "none"
        raise at.at(kind).error(
            f"the plan has no {kind} {named!r}", hint=f"its {kind}s are: {names}"
        )


def _check_branches(nodes: Mapping[str, Node], place: PlanPlace) -> None:
    """Check that each node is chosen by one branch at most, and that each case can be."""
    chosen: dict[str, str] = {}
    for name, node in nodes.items():
        if not isinstance(node, BranchNode):
            continue
        at = place.node(name)
        for target in targets(node):
            if (other := chosen.setdefault(target, name)) != name:
                raise at.at("cases").error(
                    f"{target!r} is chosen by {other!r} too",
                    hint="let each branch choose a node of its own, and join them",
                )
        for number, case in enumerate(node.cases):
            for before, earlier in enumerate(node.cases[:number]):
                if case.model_copy(update={"then": earlier.then}) == earlier:
                    raise at.at("cases", number).error(
                        f"it is never chosen: case {before} tests the same, and comes before"
                    )


def _check_order(body: Body, place: PlanPlace) -> None:
    """Check that there is no cycle, and that no node needs two ways of one branch."""
    for name in body.nodes:
        chain = body.chain(name)
        if body.nodes[chain[-1]].fallback is not None:
            way = " → ".join([*chain, str(body.nodes[chain[-1]].fallback)])
            raise place.node(name).at("fallback").error(f"fallbacks go round: {way}")
    try:
        order = body.order()
    except CycleError as error:
        cycle: list[str] = error.args[1][::-1]
        raise place.node(cycle[0]).error(
            f"nodes wait for each other: {' → '.join(cycle)}",
            hint="a node waits for those it refers to, for those in `after`, and for the branch "
            "or the node that it is a way out of",
        ) from None
    _check_ways(body, place, order)
    for name, inner in body.bodies.items():
        _check_order(inner, place.body(name))
        if inner.gives is None and len(inner.sinks) != 1:
            raise place.node(name).error(
                f"it does not say what an item gives, and {len(inner.sinks)} nodes in it could: "
                f"{', '.join(inner.sinks) or 'none'}",
                hint="name a value in `gives`",
            )


def _check_ways(body: Body, place: PlanPlace, order: Sequence[str]) -> None:
    """Check that no node needs two ways of one branch: it would never run."""
    ways: dict[str, dict[str, tuple[str, str]]] = {}
    for name in order:
        own: dict[str, tuple[str, str]] = {}
        sources = list(body.required[name])
        if (branch := body.branch_of.get(name)) is not None:
            own[branch] = (name, name)
            sources.append(branch)
        if (failed := body.fallback_of.get(name)) is not None:
            sources.append(failed)
        for source in sources:
            for branch, (way, _) in ways[source].items():
                other, by = own.setdefault(branch, (way, source))
                if other != way:
                    raise place.node(name).error(
                        f"it never runs: branch {branch!r} chooses one of {other!r} and {way!r}, "
                        f"and it needs {by!r} and {source!r}",
                        hint="let a `join` wait for both",
                    )
        ways[name] = own


def may_be_skipped(body: Body) -> dict[str, str]:
    """Return the nodes that may be skipped, and why, in a few words."""
    found: dict[str, str] = {}
    for name in body.order():
        node = body.nodes[name]
        if node.on_failure is NodeFailure.SKIP:
            found[name] = "it has `on_failure: skip`"
        if name in body.branch_of:
            found[name] = f"branch {body.branch_of[name]!r} may choose another way"
        for each in body.required[name]:
            if each in found:
                found[name] = f"{each!r} may be skipped: {found[each]}"[:200]
                break
        for each in body.chain(name)[1:]:
            if body.nodes[each].on_failure is NodeFailure.SKIP:
                found[name] = f"its fallback {each!r} may be skipped"
    return found


def _check_output(graph: Body, place: PlanPlace) -> None:
    """Check that what the plan gives is always there."""
    if graph.gives is None:
        return
    skippable = may_be_skipped(graph)
    for path, reference in references(graph.gives):
        if reference.name in skippable:
            raise place.at("output", *path).error(
                f"{reference}: {reference.name!r} may have no value: {skippable[reference.name]}",
                hint="let a `join` wait for it, and refer to that",
            )
