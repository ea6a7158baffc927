"""Types in a plan: what each node gives, as a JSON schema, and whether others can take it so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

from pydantic import JsonValue

from contracts.plan import (
    ApprovalNode,
    BranchNode,
    Case,
    JoinNode,
    LLMNode,
    MapNode,
    Node,
    Plan,
    ToolNode,
)
from workflows.plan_graph import INDEX, INPUT, ITEM, Body, references, targets, values_of
from workflows.plan_place import PlanPlace
from workflows.reference import (
    ANY,
    BadReferenceError,
    Reference,
    Schema,
    followed,
    kind_of,
    parse_text,
    schema_at,
    shown,
    types_of,
)
from workflows.schema import misfit

TEXT: Schema = {"type": "string"}

_APPROVAL: Schema = {
    "type": "object",
    "properties": {
        "approved": {"type": "boolean"},
        "by": {"type": "string"},
        "reason": {"type": "string"},
    },
    "additionalProperties": False,
}

Schemas = Mapping[str, Schema]


def check_types(plan: Plan, graph: Body) -> None:
    """Raise PlanError where a node takes something in another form than it is given."""
    place = PlanPlace()
    given = _check_body(graph, place, {INPUT: plan.input})
    if plan.output is not None:
        _check_references(plan.output, place.at("output"), given)


def check_arguments(plan: Plan, schemas: Mapping[str, Schema]) -> None:
    """Raise PlanError where a node's arguments cannot be those of its tool, whose schema is known.

    What is filled in later is held against the schema by the tool worker.
    """
    for place, name, node in all_places(plan):
        if not isinstance(node, ToolNode) or node.tool not in schemas:
            continue
        schema, at = schemas[node.tool], place.node(name).at("arguments")
        later: JsonValue = dict.fromkeys(node.arguments, ANYTHING)
        if problem := misfit({**schema, "properties": _keys(schema)}, later, "it"):
            raise at.error(problem.replace("its schema", f"{node.tool!r}"))
        known = schema.get("properties")
        for key, value in node.arguments.items():
            part = known.get(key) if isinstance(known, dict) else None
            if not isinstance(part, dict) or any(True for _ in references(value)):
                continue
            root = {**part, "$defs": schema.get("$defs", {})}
            if problem := misfit(root, value, "it"):
                raise at.at("arguments", key).error(problem)


ANYTHING = "…"
"""Stands for an argument of which nothing is known yet."""


def _keys(schema: Schema) -> JsonValue:
    known = schema.get("properties")
    return {key: {} for key in known} if isinstance(known, dict) else {}


def all_places(plan: Plan) -> Iterator[tuple[PlanPlace, str, Node]]:
    """Yield the nodes of a plan and of its maps, each with the body it is in."""
    bodies: list[tuple[PlanPlace, Mapping[str, Node]]] = [(PlanPlace(), plan.nodes)]
    while bodies:
        place, nodes = bodies.pop(0)
        for name, node in nodes.items():
            yield place, name, node
            if isinstance(node, MapNode):
                bodies.append((place.body(name), node.do))


def _check_body(body: Body, place: PlanPlace, around: Schemas) -> Schemas:
    """Check the nodes of a body in their order; return what names stand for in it."""
    known: dict[str, Schema] = dict(around)
    own: dict[str, Schema] = {}
    for name in body.order():
        node, at = body.nodes[name], place.node(name)
        for key, value in values_of(node).items():
            _check_references(value, at.at(key), known)
        if isinstance(node, BranchNode):
            _check_cases(node, at, _schema_of(node.branch, known))
        own[name] = bounded(
            _map_schema(body.bodies[name], node, at, known)
            if isinstance(node, MapNode)
            else _given_by(node, own)
        )
        # Whoever needs a node stands behind its fallbacks, which come later than it does.
        known[name] = own[name]
        for each in body.nodes:
            chain = body.chain(each)
            if name in chain[1:] and all(other in own for other in chain):
                known[each] = bounded({"anyOf": [dict(own[other]) for other in chain]})
    return known


def _check_references(value: JsonValue, at: PlanPlace, known: Schemas) -> None:
    for path, reference in references(value):
        try:
            schema_at(known[reference.name], reference)
        except BadReferenceError as error:
            hint = error.hint
            if types_of(known[reference.name]) == {"string"}:
                hint = f"{reference.name!r} gives text; with an `output` schema it gives JSON"
            raise at.at(*at.place, *path).error(error.message, hint=hint) from None


MAX_SCHEMA_PARTS = 2_000
"""Parts of a node's schema that are looked at: joins of joins double them at each step."""


def bounded(schema: Schema) -> Schema:
    """Return a schema, or one that says nothing if it has too many parts."""
    left, parts = MAX_SCHEMA_PARTS, [cast(JsonValue, schema)]
    while parts and left > 0:
        part = parts.pop()
        left -= 1
        if isinstance(part, dict):
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    return schema if left > 0 else ANY


def _given_by(node: Node, own: Schemas) -> Schema:
    match node:
        case LLMNode() if node.choices:
            return {"enum": list(node.choices)}
        case LLMNode() | ToolNode():
            return node.output if node.output is not None else TEXT
        case ApprovalNode():
            return _APPROVAL
        case BranchNode():
            return {"enum": [*targets(node), None]}
        case JoinNode():
            nullable: dict[str, JsonValue] = {name: _nullable(own[name]) for name in node.join}
            if node.first:
                return {"anyOf": list(nullable.values())}
            return {"type": "object", "properties": nullable, "additionalProperties": False}
        case _:
            return TEXT


def _map_schema(body: Body, node: MapNode, at: PlanPlace, known: Schemas) -> Schema:
    whole = _schema_of(node.map, known)
    if "array" not in types_of(whole):
        raise at.at("map").error(
            f"it takes a list, {shown(node.map)[:80]} is {' or '.join(sorted(types_of(whole)))}",
            hint="refer to a list, as in `${input.cities}`",
        )
    items = whole.get("items")
    item = items if isinstance(items, dict) else ANY
    inside: dict[str, Schema] = {**known, ITEM: item, INDEX: {"type": "integer"}}
    own = _check_body(body, at.body_of_node(), inside)
    if body.gives is None:
        [name] = body.sinks
        return {"type": "array", "items": dict(own[name])}
    _check_references(body.gives, at.at("gives"), own)
    return {"type": "array", "items": _nullable(_schema_of(body.gives, own))}


def _nullable(schema: Schema) -> JsonValue:
    return {"anyOf": [dict(schema), {"type": "null"}]}


def _schema_of(value: JsonValue, known: Schemas) -> Schema:
    """Return the schema of what a value stands for."""
    if isinstance(value, str):
        parts = parse_text(value)
        if len(parts) == 1 and isinstance(parts[0], Reference):
            return followed(schema := schema_at(known[parts[0].name], parts[0]), schema) or ANY
        return TEXT
    if isinstance(value, dict):
        fields: dict[str, JsonValue] = {
            key: dict(_schema_of(item, known)) for key, item in value.items()
        }
        return {"type": "object", "properties": fields, "additionalProperties": False}
    return {"type": kind_of(value)}


def _check_cases(node: BranchNode, at: PlanPlace, schema: Schema) -> None:
    """Check that each case can hold of a value of this schema."""
    for number, case in enumerate(node.cases):
        if problem := _never_holds(case, schema):
            raise at.at("cases", number).error(
                f"it is never chosen: {shown(node.branch)[:80]} {problem}",
                hint="a case tests what the value can be",
            )


def _never_holds(case: Case, schema: Schema) -> str:
    types, choices = types_of(schema), schema.get("enum")
    tested = [*case.one_of, *([case.equals] if "equals" in case.tests else [])]
    for each in tested:
        kind = "number" if kind_of(each) == "integer" else kind_of(each)
        if kind not in types:
            return f"is {' or '.join(sorted(types))}, never {shown(each)}, which is {kind}"
        if isinstance(choices, list) and each not in choices:
            known = ", ".join(shown(choice) for choice in choices)
            return f"is one of {known[:300]}, never {shown(each)}"
    if (case.above is not None or case.below is not None) and "number" not in types:
        return f"is {' or '.join(sorted(types))}, and only numbers are above or below"
    return ""
