"""What a model is held to, of a schema that others wrote: what every engine's grammar can keep.

Engines refuse some of JSON schema's words (`uniqueItems`, `multipleOf`, most of `format`), read
others loosely (`allOf`, `pattern`), and look for what a `$ref` leads to in `$defs` alone. A model
that is held to less than the schema says can still be told what is wrong, since the whole schema is
checked when the tool is called; one that is held to what its grammar cannot keep fails its step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import unquote

from contracts.error import BadInputError

MAX_DEPTH = 24
"""Schemas within schemas; what is deeper may be any JSON."""

MAX_COUNT = 200
"""Largest bound on a length or a count that is kept: a grammar repeats its rule that often."""

MAX_NUMBER = 2**53
"""Largest bound on a number that is kept: engines read numbers in 64 bits."""

DEFINITIONS = "#/$defs/"

_COUNTS = ("maxItems", "maxLength", "minItems", "minLength")
_BOUNDS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum")
_CHOICES = ("anyOf", "oneOf")
_AS_IT_IS = ("const", "description", "enum", "type")


def told_schema(tool: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a tool's schema the model is held to; raises BadInputError.

    The schema is JSON schema of an object, as `check_schema` has found.
    """
    simple = _Simple(tool, schema)
    root = simple.of(schema, 0)
    root = {"type": "object", "properties": {}} | root
    definitions = simple.definitions()
    return root | {"$defs": definitions} if definitions else root


class _Simple:
    """Simplifies one schema and collects what it refers to."""

    def __init__(self, tool: str, root: Mapping[str, Any]) -> None:
        self._tool, self._root = tool, root
        self._names: dict[str, str] = {}
        self._found: dict[str, Any] = {}

    def of(self, schema: Any, depth: int) -> dict[str, Any]:
        """Return a schema simplified."""
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return {}
        if isinstance(reference := schema.get("$ref"), str):
            return {"$ref": f"{DEFINITIONS}{self._named(reference)}"}
        found = {key: schema[key] for key in _AS_IT_IS if key in schema}
        found |= {key: schema[key] for key in _COUNTS if _is_small(schema.get(key), MAX_COUNT)}
        found |= {key: schema[key] for key in _BOUNDS if _is_small(schema.get(key), MAX_NUMBER)}
        for key in _CHOICES:
            if key in schema and "anyOf" not in found:
                found["anyOf"] = [self.of(each, depth + 1) for each in schema[key]]
        if isinstance(parts := schema.get("allOf"), list) and len(parts) == 1 and not found:
            return self.of(parts[0], depth + 1)
        if "prefixItems" in schema:
            found["prefixItems"] = [self.of(each, depth + 1) for each in schema["prefixItems"]]
        if isinstance(schema.get("items"), Mapping):
            found["items"] = self.of(schema["items"], depth + 1)
        return found | self._properties(schema, depth)

    def _properties(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        given, required = schema.get("properties", {}), schema.get("required", [])
        found: dict[str, Any] = {}
        if given or required:
            parts = {key: self.of(each, depth + 1) for key, each in given.items()}
            found["properties"] = {key: {} for key in required} | parts
        if required:
            found["required"] = required
        others = schema.get("additionalProperties")
        if isinstance(others, Mapping):
            found["additionalProperties"] = self.of(others, depth + 1)
        elif isinstance(others, bool):
            found["additionalProperties"] = others
        elif schema.get("type") == "object" and not given and depth:
            found["additionalProperties"] = True  # else a grammar takes it for an empty object
        return found

    def definitions(self) -> dict[str, Any]:
        """Return what is referred to; raises BadInputError for references without an end."""
        while len(self._found) < len(self._names):
            for reference, name in list(self._names.items()):
                if name not in self._found:
                    self._found[name] = self.of(self._target(reference), 1)
        graph = {name: set(_in_place(each)) for name, each in self._found.items()}
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            reference = next(r for r, name in self._names.items() if name == error.args[1][0])
            raise self._bad(f"the $ref {reference!r} leads back to itself") from None
        return self._found

    def _named(self, reference: str) -> str:
        if reference not in self._names:
            last = re.sub(r"\W", "_", reference.rpartition("/")[2])[:40]
            self._names[reference] = f"{last}_{len(self._names) + 1}"
        return self._names[reference]

    def _target(self, reference: str) -> Any:
        found: Any = self._root
        pointer = unquote(reference.removeprefix("#"))
        if not reference.startswith("#") or (pointer and not pointer.startswith("/")):
            raise self._bad(f"the $ref {reference!r} leads out of it")
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, IndexError, TypeError, ValueError):
                raise self._bad(f"the $ref {reference!r} leads nowhere") from None
        return found

    def _bad(self, problem: str) -> BadInputError:
        return BadInputError(
            f"tool {self._tool!r}: the schema of its arguments cannot be used; {problem}",
            hint="leave the tool out, or let its server give a schema that is whole",
        )


def _is_small(value: Any, limit: int) -> bool:
    """Say whether a bound is a number that a grammar can keep."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= limit


def _in_place(schema: Any) -> Iterator[str]:
    """Yield the definitions that are about the same value as a schema."""
    if isinstance(reference := schema.get("$ref"), str):
        yield reference.removeprefix(DEFINITIONS)
    for each in schema.get("anyOf", ()):
        yield from _in_place(each)
