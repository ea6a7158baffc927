"""A digest of all that an object reaches: two that are equal mean that nothing has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any


def snapshot(thing: object) -> str:
    """Return a text of all that is reachable; an object met again is named by its first place."""
    lines: list[str] = []
    seen: dict[int, int] = {}
    alive: list[object] = []  # what is seen stays alive, so that no id is used twice

    def walk(value: Any, depth: int) -> None:
        if value is None or isinstance(value, str | int | float | bool):
            lines.append(f"{depth}{value!r}")
            return
        if id(value) in seen:
            lines.append(f"{depth}^{seen[id(value)]}")
            return
        seen[id(value)] = len(seen)
        alive.append(value)
        lines.append(f"{depth}{type(value).__name__}")
        for part in _parts(value):
            walk(part, depth + 1)

    walk(thing, 0)
    return "\n".join(lines)


def _parts(value: Any) -> list[object]:
    if isinstance(value, Mapping):
        return [part for item in value.items() for part in item]
    if isinstance(value, Sequence | Set):
        return list(value)
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    names = [*getattr(value, "__dict__", {}), *slots]
    return [part for name in names for part in (name, getattr(value, name, None))]
