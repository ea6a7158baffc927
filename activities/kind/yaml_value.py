"""YAML as plain data, by the rules of version 1.2 that OpenAPI asks for: `on` and dates are text.

It is built from the parser's events. PyYAML's own way makes a whole tree in C first, and nothing
else in the process runs for that long: a second for each megabyte. Parts that are used again
(`*name`) are shared, not copied, so a small text stays small.
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml
from yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceStartEvent,
)

_CORE = "tag:yaml.org,2002:"
_INTEGER = re.compile(r"[-+]?[0-9]+")
_NUMBER = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_TAGS = frozenset(
    f"{_CORE}{kind}" for kind in ("map", "seq", "str", "int", "float", "bool", "null")
)
_PARSER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_NOTHING = object()


def read_yaml(text: str) -> Any:
    """Return the value of a text's one document; keys are text, status codes say.

    Raises yaml.YAMLError, or ValueError for what is YAML but not plain data.
    """
    builder = _Builder()
    for event in yaml.parse(text, Loader=_PARSER):
        if isinstance(event, NodeEvent | CollectionEndEvent):
            builder.take(event)
    return builder.value


class _Builder:
    """Puts each value where the containers around it wait for one."""

    def __init__(self) -> None:
        self.value: Any = None
        self._open: list[tuple[Any, str | None]] = []
        """Containers that are not closed, each with the key that waits for its value."""
        self._named: dict[str, Any] = {}
        self._is_done = False

    def take(self, event: Any) -> None:
        """Take the next event."""
        if self._is_done:
            raise ValueError("it holds more than one document")
        if isinstance(event, CollectionEndEvent):
            self._open.pop()
            self._is_done = not self._open
            return
        value = self._value(event)
        self._put(value)
        if isinstance(event, MappingStartEvent | SequenceStartEvent):
            self._open.append((value, None))
        self._is_done = not self._open

    def _value(self, event: Any) -> Any:
        if isinstance(event, AliasEvent):
            found = self._named.get(str(event.anchor), _NOTHING)
            if found is _NOTHING:
                raise ValueError(f"nothing is named {event.anchor!r}")
            if any(found is container for container, _ in self._open):
                raise ValueError(f"{event.anchor!r} holds itself")
            return found
        if event.tag is not None and event.tag not in _TAGS and event.tag != "!":
            raise ValueError(f"{event.tag[:80]!r} is no kind of plain data")
        value: Any
        if isinstance(event, ScalarEvent):
            value = _scalar(event)
        else:
            value = {} if isinstance(event, MappingStartEvent) else []
        if event.anchor:
            self._named[event.anchor] = value
        return value

    def _put(self, value: Any) -> None:
        if not self._open:
            self.value = value
            return
        container, key = self._open[-1]
        if isinstance(container, list):
            container.append(value)
        elif key is None:
            if isinstance(value, dict | list):
                raise ValueError("a key is an object or an array")
            self._open[-1] = container, value if isinstance(value, str) else _as_key(value)
        else:
            container[key] = value
            self._open[-1] = container, None


def _scalar(event: ScalarEvent) -> Any:
    text: str = event.value
    is_plain = (
        bool(event.implicit[0]) if event.tag is None else event.tag not in (f"{_CORE}str", "!")
    )
    if not is_plain:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


def _as_key(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
