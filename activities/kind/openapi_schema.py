"""Schemas of OpenAPI documents as JSON schema 2020-12, with what they refer to as `$defs`.

OpenAPI 3.1 has JSON schema as it is, 3.0 a dialect: `nullable`, `exclusiveMinimum: true`,
`example`. Documents mix the two, so both are read in both. What only documents the service, or is
for its answers (`readOnly`), is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

from activities.kind.openapi_document import Document, pointer_parts
from contracts.error import BadInputError

MAX_NODES = 20_000
"""Schemas within one operation's arguments: more take longer to check than a call should."""

MAX_DEPTH = 64
"""Schemas within schemas, without those that a reference leads to."""

PREFIX = "#/$defs/"

_LEFT_OUT = object()

_ONE = frozenset(
    ("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
     "unevaluatedItems", "unevaluatedProperties")
)  # fmt: skip
_MANY = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
_NAMED = frozenset(("dependentSchemas", "patternProperties", "properties"))
_PLAIN = frozenset(
    ("const", "default", "dependentRequired", "description", "enum", "examples", "exclusiveMaximum",
     "exclusiveMinimum", "format", "maxContains", "maxItems", "maxLength", "maxProperties",
     "maximum", "minContains", "minItems", "minLength", "minProperties", "minimum", "multipleOf",
     "pattern", "required", "type", "uniqueItems")
)  # fmt: skip
_FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
)
"""Formats that JSON schema knows too."""

_JOINED = frozenset(
    ("allOf", "description", "discriminator", "example", "examples", "externalDocs", "properties",
     "required", "title", "type", "xml")
)  # fmt: skip
"""Keywords of a plain object, which may be a part of another one."""

_MAX_PARTS_DEEP = 8
"""Objects made of objects."""

_IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas")
"""Where a schema is about the same value as the one around it."""


class Schemas:
    """Translates the schemas of one operation and collects what they refer to."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._names: dict[str, str] = {}
        self._waiting: list[str] = []
        self._left = MAX_NODES
        self._definitions: dict[str, Any] = {}

    def translated(self, schema: Any) -> dict[str, Any]:
        """Return a schema in JSON schema; one that only refers to another is that other.

        An object that `allOf` puts together is one object.
        """
        if isinstance(schema, dict) and set(schema) <= {"$ref", "description", "summary"}:
            target = self._document.followed(schema, "a schema")
            found = self._translate(self._joined(target, 0), 0)
            if isinstance(found, dict) and isinstance(schema.get("description"), str):
                found = found | {"description": schema["description"]}
        else:
            whole = self._joined(schema, 0) if isinstance(schema, dict) else schema
            found = self._translate(whole, 0)
        if found is True:
            return {}
        return {"not": {}} if found is False else found

    def definitions(self) -> dict[str, Any]:
        """Return what the schemas so far refer to; raises BadInputError for endless references."""
        while self._waiting:
            reference = self._waiting.pop()
            target = self._document.target(reference)
            self._definitions[self._names[reference]] = self._translate(target, 0)
        graph = {name: set(_in_place(each)) for name, each in self._definitions.items()}
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            names = {name: reference for reference, name in self._names.items()}
            raise self._document.loop(names[error.args[1][0]]) from None
        return self._definitions

    def _joined(self, schema: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
        """Return the plain object that `allOf` makes of others; any other schema as it is."""
        parts = schema.get("allOf")
        if not isinstance(parts, list) or set(schema) - _JOINED or depth > _MAX_PARTS_DEEP:
            return schema
        found: dict[str, Any] = {}
        required: list[Any] = []
        for part in (*parts, {key: each for key, each in schema.items() if key != "allOf"}):
            each = self._joined(self._document.followed(part, "a schema"), depth + 1)
            properties, needed = each.get("properties", {}), each.get("required", [])
            is_plain = (
                set(each) <= _JOINED - {"allOf"}
                and each.get("type", "object") == "object"
                and isinstance(properties, dict)
                and isinstance(needed, list)
            )
            if not is_plain or any(
                found.get(key, value) != value for key, value in properties.items()
            ):
                return schema
            found |= properties
            required += [name for name in needed if name not in required]
        told = {key: schema[key] for key in ("description",) if key in schema}
        return {"type": "object", "properties": found, "required": required, **told}

    def _translate(self, schema: Any, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if schema is None:
            return {}
        given = self._document.mapping(schema, "a schema")
        self._left -= 1
        if self._left < 0:
            raise self._too_large(f"more than {MAX_NODES:,} schemas")
        if depth > MAX_DEPTH:
            raise self._too_large(f"schemas nested more than {MAX_DEPTH} deep")
        found = {
            key: each
            for key, value in given.items()
            if (each := self._keyword(key, value, given, depth)) is not _LEFT_OUT
        }
        if isinstance(reference := given.get("$ref"), str):
            found = self._referring(reference, found)
        if "example" in given and "examples" not in found:
            found["examples"] = [given["example"]]
        for name in ("Minimum", "Maximum"):
            _translate_bound(found, f"exclusive{name}", name.lower())
        return _nullable(found) if given.get("nullable") is True else found

    def _keyword(self, key: str, value: Any, given: Mapping[str, Any], depth: int) -> Any:
        """Return what a keyword's value becomes, or that it is left out."""
        if key in _ONE:
            return self._translate(value, depth + 1)
        if key in _MANY:
            if not isinstance(value, list):
                raise self._document.bad(f"`{key}` of a schema is not a list")
            return [self._translate(each, depth + 1) for each in value]
        if key in _NAMED:
            parts = self._document.mapping({} if value is None else value, f"`{key}` of a schema")
            return {
                name: self._translate(each, depth + 1)
                for name, each in parts.items()
                if not _is_read_only(each)
            }
        if key not in _PLAIN:
            return _LEFT_OUT
        if key == "required":
            return self._required(value, given)
        if (key == "format" and value not in _FORMATS) or (key == "pattern" and _is_odd(value)):
            return _LEFT_OUT
        return value

    def _too_large(self, what: str) -> BadInputError:
        return self._document.bad(
            f"the arguments of an operation have {what}",
            "choose other operations with `tools: [...]`",
        )

    def _required(self, value: Any, given: Mapping[str, Any]) -> Any:
        if not isinstance(value, list):
            return _LEFT_OUT  # `required: true` within a property is a common slip
        properties = given.get("properties")
        parts = properties if isinstance(properties, dict) else {}
        return [name for name in value if not _is_read_only(parts.get(str(name)))]

    def _referring(self, reference: str, beside: dict[str, Any]) -> dict[str, Any]:
        if reference not in self._names:
            last = (pointer_parts(reference) or ["schema"])[-1]
            stem = re.sub(r"[^A-Za-z0-9_-]", "_", last)[:60]
            taken = set(self._names.values())
            name, number = stem, 2
            while name in taken:
                name, number = f"{stem}_{number}", number + 1
            self._names[reference] = name
            self._waiting.append(reference)
        if self._document.version == "3.0":  # where what stands beside it means nothing
            beside = {key: each for key, each in beside.items() if key == "description"}
        return {"$ref": f"{PREFIX}{self._names[reference]}", **beside}


def _translate_bound(found: dict[str, Any], exclusive: str, inclusive: str) -> None:
    if isinstance(found.get(exclusive), bool) and found.pop(exclusive) and inclusive in found:
        found[exclusive] = found.pop(inclusive)


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    kind = schema.get("type")
    if kind is None:
        told: dict[str, Any] = {
            key: schema.pop(key) for key in ("description", "default") if key in schema
        }
        return {"anyOf": [schema, {"type": "null"}]} | told if schema else told
    kinds = kind if isinstance(kind, list) else [kind]
    if "null" not in kinds:
        schema["type"] = [*kinds, "null"]
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]
    return schema


def _is_read_only(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("readOnly") is True


def _is_odd(pattern: Any) -> bool:
    """Say whether a pattern is one of JavaScript's that Python does not read."""
    try:
        re.compile(pattern)
    except (re.error, TypeError, RecursionError, OverflowError):
        return True
    return False


def _in_place(schema: Any) -> Iterator[str]:
    """Yield the definitions that a schema needs to say anything of the same value."""
    if not isinstance(schema, dict):
        return
    if isinstance(reference := schema.get("$ref"), str):
        yield reference.removeprefix(PREFIX)
    for key in _IN_PLACE:
        part = schema.get(key)
        if isinstance(part, list):
            parts = part
        else:
            parts = list(part.values()) if key == "dependentSchemas" and part else [part]
        for each in parts:
            yield from _in_place(each)
