"""Make a small valid instance of a JSON schema: what the simulated engine answers by default."""

from __future__ import annotations

import random
import re
from typing import Any

from inference_service.engine.protocol import EngineRequestError

MAX_DEPTH = 32
"""Nesting of one instance; a schema that needs more has no finite instance we would find."""

WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "iris", "jade")

FORMATS = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "time": "12:00:00Z",
    "email": "a@example.com",
    "uri": "https://example.com/a",
    "uuid": "00000000-0000-4000-8000-000000000000",
}

CANDIDATES = ("a", "A", "1", "a1", "ab-1", "12:00:00", "", *FORMATS.values(), *WORDS)
"""Texts that are tried on a pattern."""


def make_instance(schema: dict[str, Any], rng: random.Random) -> Any:
    """Return a minimal JSON value that satisfies `schema`; choices are drawn from `rng`.

    Understands const, enum, anyOf, oneOf, allOf, local $ref, and the usual limits of each type.
    Raises EngineRequestError for a schema it cannot satisfy (a rare pattern, endless recursion).
    """
    return _Maker(schema, rng).make(schema, 0)


class _Maker:
    def __init__(self, root: dict[str, Any], rng: random.Random) -> None:
        self._root = root
        self._rng = rng

    def make(self, schema: dict[str, Any] | bool, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise EngineRequestError(f"JSON schema nests deeper than {MAX_DEPTH} levels")
        if isinstance(schema, bool):
            return None
        schema = self._resolve(schema)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._rng.choice(schema["enum"])
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                rest = {key: value for key, value in schema.items() if key != keyword}
                return self.make(_merge([rest, self._rng.choice(schema[keyword])]), depth + 1)
        return self._of_type(self._type(schema), schema, depth)

    def _resolve(self, schema: dict[str, Any]) -> dict[str, Any]:
        for _ in range(MAX_DEPTH):
            if "$ref" in schema:
                rest = {key: value for key, value in schema.items() if key != "$ref"}
                schema = _merge([self._lookup(schema["$ref"]), rest])
            elif "allOf" in schema:
                rest = {key: value for key, value in schema.items() if key != "allOf"}
                schema = _merge([rest, *map(self._resolve, schema["allOf"])])
            else:
                return schema
        raise EngineRequestError("JSON schema refers to itself without end")

    def _lookup(self, pointer: str) -> dict[str, Any]:
        node: Any = self._root
        for part in pointer.removeprefix("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            node = node.get(key) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            raise EngineRequestError(f"JSON schema has no {pointer!r}")
        return node

    @staticmethod
    def _type(schema: dict[str, Any]) -> str:
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = kind[0]
        if kind is None:
            is_object = "properties" in schema or "required" in schema
            kind = "object" if is_object else "array" if "items" in schema else "string"
        return kind

    def _of_type(self, kind: str, schema: dict[str, Any], depth: int) -> Any:
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return self._string(schema)
            case "integer" | "number":
                return self._number(schema, whole=kind == "integer")
            case "boolean":
                return self._rng.random() < 0.5
            case "null":
                return None
            case _:
                raise EngineRequestError(f"JSON schema has the unknown type {kind!r}")

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        names = [name for name in properties if name in required]
        names += [name for name in required if name not in properties]
        extra = schema.get("additionalProperties", True)
        return {name: self.make(properties.get(name, extra), depth + 1) for name in names}

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        prefix = schema.get("prefixItems", [])
        items = schema.get("items", True)
        length = max(schema.get("minItems", 0), len(prefix))
        parts = [*prefix, *[items] * (length - len(prefix))]
        return [self.make(part, depth + 1) for part in parts]

    def _string(self, schema: dict[str, Any]) -> str:
        shortest = schema.get("minLength", 0)
        longest = schema.get("maxLength", max(shortest, 16))
        if "pattern" in schema:
            return _matching(schema["pattern"], shortest, longest)
        text = FORMATS.get(schema.get("format", "")) or self._rng.choice(WORDS)
        return text.ljust(shortest, "a")[:longest] if "format" not in schema else text

    def _number(self, schema: dict[str, Any], *, whole: bool) -> int | float:
        step = schema.get("multipleOf", 1 if whole else None)
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        if step is None and low is not None and high is not None:
            return float(low + high) / 2
        step = step or 1
        if low is None:
            low = 0 if high is None or high > 0 else (high // step - 1) * step
        value = -(-low // step) * step
        if value == schema.get("exclusiveMinimum"):
            value += step
        return int(value) if whole else float(value)


def _merge(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one schema that asks for what all of them ask; a later keyword wins."""
    merged: dict[str, Any] = {}
    for schema in schemas:
        for key, value in schema.items():
            before = merged.get(key)
            if key == "properties" and before is not None:
                merged[key] = {**before, **value}
            elif key == "required" and before is not None:
                merged[key] = [*before, *(name for name in value if name not in before)]
            else:
                merged[key] = value
    return merged


def _matching(pattern: str, shortest: int, longest: int) -> str:
    for candidate in (*CANDIDATES, "a" * max(shortest, 1), "0" * max(shortest, 1)):
        if shortest <= len(candidate) <= longest and re.search(pattern, candidate):
            return candidate
    raise EngineRequestError(
        f"the simulated engine knows no text that matches the pattern {pattern!r}",
        hint="give the engine a `respond` function that does",
    )
