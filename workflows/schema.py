"""Values held against JSON schemas, as far as a plan needs it: types, fields, choices.

Numbers' bounds, patterns and formats are left to those who make the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from pydantic import JsonValue

from workflows.reference import ANY, Schema, followed, kind_of, shown

MAX_DEPTH = 64
"""Levels to which a value is looked at: a schema may lead back to itself."""


def misfit(schema: Schema, value: JsonValue, what: str = "it") -> str | None:
    """Return what about `value` does not fit, in words that call it `what`; None if it fits."""
    return _misfit(schema, value, what, schema, MAX_DEPTH)


def _misfit(schema: Schema, value: JsonValue, what: str, root: Schema, depth: int) -> str | None:
    schema = followed(schema, root)
    if depth == 0 or not schema:
        return None
    if "const" in schema and not _same(schema["const"], value):
        return f"{what} is not {shown(schema['const'])}"
    choices = schema.get("enum")
    if isinstance(choices, list) and not any(_same(each, value) for each in choices):
        return f"{what} is none of {', '.join(shown(each) for each in choices)[:300]}"
    if (problem := _wrong_type(schema, value, what)) is not None:
        return problem
    for key in ("anyOf", "oneOf"):
        ways = schema.get(key)
        if isinstance(ways, list) and all(
            isinstance(way, Mapping) and _misfit(way, value, what, root, depth - 1) for way in ways
        ):
            return f"{what} fits none of the ways of its schema"
    if isinstance(value, dict):
        return _wrong_field(schema, value, what, root, depth)
    if isinstance(value, list) and isinstance(items := schema.get("items"), dict):
        for place, item in enumerate(value):
            if problem := _misfit(items, item, f"{what}[{place}]", root, depth - 1):
                return problem
    return None


def _wrong_type(schema: Schema, value: JsonValue, what: str) -> str | None:
    named = schema.get("type")
    if named is None:
        return None
    types = [str(each) for each in (named if isinstance(named, list) else [named])]
    kind = kind_of(value)
    fits = kind in types or (kind == "integer" and "number" in types)
    is_whole = isinstance(value, float) and value.is_integer() and "integer" in types
    return None if fits or is_whole else f"{what} is not {' or '.join(types)} but {kind}"


def _wrong_field(
    schema: Schema, value: dict[str, JsonValue], what: str, root: Schema, depth: int
) -> str | None:
    required = schema.get("required")
    for name in required if isinstance(required, list) else ():
        if name not in value:
            return f"{what} lacks {name!r}"
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    for name, item in value.items():
        inner = known.get(name, schema.get("additionalProperties", True))
        if name not in known and "patternProperties" in schema:
            continue
        if inner is False:
            there = ", ".join(list(known)[:20]) or "nothing"
            return f"{what} has {name!r}, which its schema does not know: it knows {there}"
        part = cast(Schema, inner) if isinstance(inner, dict) else ANY
        if problem := _misfit(part, item, f"{what}.{name}", root, depth - 1):
            return problem
    return None


def _same(one: JsonValue, other: JsonValue) -> bool:
    """Say whether two values are equal as JSON: true is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)
