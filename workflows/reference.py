"""References in a plan: `${node.field[0]}`, read, followed into values and into their schemas."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from pydantic import JsonValue
from pydantic_core import to_json

from contracts.error import BadInputError

Step = str | int
Scope = Mapping[str, JsonValue]
"""What names stand for: nodes that have ended, `input`, and in a map `item` and `index`."""

_OPEN = re.compile(r"\$\$\{|\$\{")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_FIELD = re.compile(r"\.([A-Za-z_][A-Za-z0-9_-]*)|\[(\d{1,9})\]")

_HINT = "write `${node}`, `${node.field}` or `${node.list[0]}`; `$${` stands for `${` itself"


class BadReferenceError(BadInputError):
    """A reference that cannot be read, or that leads to no value."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What stands between `${` and `}`: a name, and the way from its value to a part of it."""

    name: str
    steps: tuple[Step, ...] = ()

    def __str__(self) -> str:
        ways = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.steps)
        return f"${{{self.name}{ways}}}"

    def value(self, scope: Scope) -> JsonValue:
        """Return the value it leads to; raises BadReferenceError that says where the way ends."""
        if self.name not in scope:
            raise BadReferenceError(f"{self}: there is no {self.name!r}", hint=_HINT)
        value = scope[self.name]
        for place, step in enumerate(self.steps):
            at = Reference(self.name, self.steps[:place])
            if isinstance(step, int) and isinstance(value, list):
                if step >= len(value):
                    raise BadReferenceError(
                        f"{self}: {at} has {len(value)} items", hint="items count from 0"
                    )
                value = value[step]
            elif isinstance(step, str) and isinstance(value, dict):
                if step not in value:
                    there = ", ".join(list(value)[:20]) or "nothing"
                    raise BadReferenceError(f"{self}: {at} has no {step!r}", hint=f"it has {there}")
                value = value[step]
            else:
                wanted = "a list" if isinstance(step, int) else "an object"
                raise BadReferenceError(
                    f"{self}: {at} is not {wanted} but {kind_of(value)}", hint=_HINT
                )
        return value


Template = tuple[str | Reference, ...]


def parse_text(text: str) -> Template:
    """Return a text's parts in their order; raises BadReferenceError."""
    parts: list[str | Reference] = []
    plain, place = "", 0
    while found := _OPEN.search(text, place):
        plain += text[place : found.start()]
        if found[0] == "$${":
            plain, place = plain + "${", found.end()
            continue
        reference, place = _parse(text, found.end())
        parts += [plain, reference] if plain else [reference]
        plain = ""
    plain += text[place:]
    return (*parts, plain) if plain or not parts else tuple(parts)


def _parse(text: str, start: int) -> tuple[Reference, int]:
    """Read a reference from behind its `${`; return it and the place behind its `}`."""
    shown = text[start - 2 : start + 60]
    name = _NAME.match(text, start)
    if not name:
        raise BadReferenceError(f"{shown!r}: a name is missing behind `${{`", hint=_HINT)
    steps: list[Step] = []
    place = name.end()
    while step := _FIELD.match(text, place):
        steps.append(step[1] if step[1] is not None else int(step[2]))
        place = step.end()
    if text[place : place + 1] != "}":
        raise BadReferenceError(f"{shown!r}: no `}}` where the reference should end", hint=_HINT)
    return Reference(name[0], tuple(steps)), place + 1


def texts(value: JsonValue, path: tuple[Step, ...] = ()) -> Iterator[tuple[tuple[Step, ...], str]]:
    """Yield each text in a JSON value, with its path; keys hold no references."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from texts(item, (*path, place))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from texts(item, (*path, key))


def fill(value: JsonValue, scope: Scope) -> JsonValue:
    """Return a JSON value with the values of its references; raises BadReferenceError."""
    if isinstance(value, str):
        return fill_text(value, scope)
    if isinstance(value, list):
        return [fill(item, scope) for item in value]
    if isinstance(value, dict):
        return {key: fill(item, scope) for key, item in value.items()}
    return value


def fill_text(text: str, scope: Scope) -> JsonValue:
    """Return what a text stands for: of one reference alone its value, else text."""
    parts = parse_text(text)
    if len(parts) == 1 and isinstance(parts[0], Reference):
        return parts[0].value(scope)
    return "".join(
        shown(part.value(scope)) if isinstance(part, Reference) else part for part in parts
    )


def shown(value: JsonValue) -> str:
    """Return a value as it stands among other words: text as it is, all else as JSON."""
    return value if isinstance(value, str) else to_json(value).decode()


def kind_of(value: JsonValue) -> str:
    """Return what JSON Schema calls the type of a value."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


Schema = Mapping[str, JsonValue]

ANY: Schema = {}
"""The schema of a value that nothing is known of."""

_ALL = frozenset(("null", "boolean", "number", "string", "array", "object"))


def types_of(schema: Schema, root: Schema | None = None) -> frozenset[str]:
    """Return the types that a value of this schema may have; `integer` counts as `number`."""
    root = schema if root is None else root
    schema = followed(schema, root)
    if "const" in schema:
        return frozenset((_wide(kind_of(schema["const"])),))
    if isinstance(enum := schema.get("enum"), list):
        return frozenset(_wide(kind_of(value)) for value in enum)
    named = schema.get("type")
    types = frozenset(_wide(str(each)) for each in (named if isinstance(named, list) else [named]))
    types = types if named is not None else _ALL
    for key in ("anyOf", "oneOf"):
        if isinstance(ways := schema.get(key), list):
            either = [types_of(cast(Schema, way), root) for way in ways if isinstance(way, dict)]
            types &= frozenset().union(*either) if len(either) == len(ways) else _ALL
    return types


def _wide(name: str) -> str:
    return "number" if name == "integer" else name


def schema_at(schema: Schema, reference: Reference) -> Schema:
    """Return the schema of the part that `reference` leads to, `ANY` where it says nothing of it.

    Raises BadReferenceError where no value of the schema could have that part.
    """
    root = schema
    for place, step in enumerate(reference.steps):
        at = Reference(reference.name, reference.steps[:place])
        schema = followed(schema, root)
        wanted = "array" if isinstance(step, int) else "object"
        types = types_of(schema, root)
        if wanted not in types:
            raise BadReferenceError(
                f"{reference}: {at} is {' or '.join(sorted(types))}, not an {wanted}", hint=_HINT
            )
        if isinstance(step, int):
            part = schema.get("items")
        else:
            part = _property(schema, step, reference, at)
        schema = cast(Schema, part) if isinstance(part, dict) else ANY
        if part is True or part is None:
            root = ANY
    # A part may still speak of its whole's definitions.
    definitions = root.get("$defs")
    return {**schema, "$defs": definitions} if definitions and "$ref" in str(schema) else schema


def _property(schema: Schema, step: str, reference: Reference, at: Reference) -> JsonValue:
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    if step in known:
        return known[step]
    more = schema.get("additionalProperties", not known)
    is_open = any(key in schema for key in ("anyOf", "oneOf", "allOf", "patternProperties"))
    if more is False and not is_open:
        there = ", ".join(list(known)[:20]) or "nothing"
        raise BadReferenceError(
            f"{reference}: {at} has no {step!r}", hint=f"it has {there}, says its schema"
        )
    return more


def followed(schema: Schema, root: Schema) -> Schema:
    """Return what a local `$ref` leads to, `ANY` if that cannot be found."""
    seen: set[str] = set()
    while isinstance(ref := schema.get("$ref"), str):
        if ref in seen or not ref.startswith("#"):
            return ANY
        seen.add(ref)
        found: JsonValue = dict(root)
        for part in ref.removeprefix("#").strip("/").split("/"):
            if part:
                found = found.get(part) if isinstance(found, dict) else None
        schema = found if isinstance(found, dict) else ANY
    return schema
