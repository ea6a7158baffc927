"""What a tool returned, as the text that the model reads; too large or not text is an error."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python

from activities.error_map import Scrub
from contracts.error import LimitExceededError, MusterError

MAX_MEASURED_BYTES = 2_000_000
"""Past this, and the tool's own limit, nested data is only known to be larger: measuring on costs
what the limit saves."""

PREVIEW_CHARS = 500
"""Of a result whose text the store keeps."""

MAX_DEPTH = 200
"""Containers within containers; JSON readers stop soon after."""

_END = object()


class ToolResultError(MusterError):
    """A tool returned something that no retry makes into text."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A tool's result as text, and its size as JSON, in bytes."""

    text: str
    bytes: int

    def preview(self) -> str:
        """Return its beginning and a note that says what that is."""
        head = self.text[:PREVIEW_CHARS]
        note = (
            f"the first {len(head):,} characters of {self.bytes:,} bytes; the store has the whole"
        )
        return f"{head}…\n[{note}]"


def render(tool: str, value: Any, max_bytes: int, scrub: Scrub = str) -> Rendered:
    """Return a tool's result as text: a `str` as it is, bytes as UTF-8, all else as compact JSON.

    What `scrub` takes out of it is gone before anything else sees it. Size is counted as the text
    takes it in a JSON payload, so `max_bytes` bounds that too. Raises ToolResultError or
    LimitExceededError, which name the tool.
    """
    enough = max(MAX_MEASURED_BYTES, max_bytes)
    at_least = 0 if isinstance(value, (str, bytes)) else _size_at_least(tool, value, enough)
    if at_least > enough:
        raise _too_large(f"the result of tool {tool!r} (measured in part)", at_least, max_bytes)
    text = scrub(_text(tool, value))
    try:
        size = len(to_json(text)) - len('""')
    except PydanticSerializationError as error:
        raise _not_text(tool, value, "it has characters that UTF-8 cannot encode") from error
    if size > max_bytes:
        raise _too_large(f"the result of tool {tool!r}", size, max_bytes)
    return Rendered(text, size)


def _text(tool: str, value: Any) -> str:
    if isinstance(value, str):
        return str(value)
    try:
        if isinstance(value, bytes):
            return value.decode()
        plain = to_jsonable_python(value, inf_nan_mode="constants")
        return json.dumps(plain, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except (UnicodeDecodeError, PydanticSerializationError) as error:
        raise _not_text(tool, value, str(error)) from error
    except RecursionError as error:
        raise _not_text(tool, value, "it is nested too deeply") from error
    except ValueError as error:
        reason = "it holds NaN or an infinity, which JSON does not have"
        raise _not_text(tool, value, str(error) if "ircular" in str(error) else reason) from error
    except Exception as error:  # a property or serialiser of the tool's own class
        raise _not_text(tool, value, f"{type(error).__name__}: {error}") from error


def _size_at_least(tool: str, value: Any, enough: int) -> int:
    """Return a size in bytes that the rendered text certainly has; refuse what has no end.

    Counting ends once the size is more than `enough`. Generators are refused wherever they hide in
    containers: pydantic would run them dry.
    """
    size, path = 0, [(0, iter((value,)))]
    above: set[int] = set()
    while path and size <= enough:
        item = next(path[-1][1], _END)
        if item is _END:
            above.discard(path.pop()[0])
            continue
        size += 1
        if isinstance(item, (str, bytes)):
            size += len(item)
        elif isinstance(item, (dict, list, tuple, set, frozenset)):
            if id(item) in above:
                raise _not_text(tool, value, "it contains itself")
            if len(path) > MAX_DEPTH:
                raise _not_text(tool, value, f"it is nested deeper than {MAX_DEPTH} levels")
            above.add(id(item))
            path.append((id(item), _items(item)))
        elif isinstance(item, (Iterator, AsyncIterator)):
            raise _not_text(tool, value, f"it holds a {type(item).__name__}; return a list")
    return size


def _items(container: Any) -> Iterator[Any]:
    if isinstance(container, dict):
        for key, value in container.items():
            yield key
            yield value
    else:
        yield from container


def _not_text(tool: str, value: Any, reason: str) -> ToolResultError:
    return ToolResultError(
        f"tool {tool!r} returned a {type(value).__name__} that cannot become text: {reason}",
        hint="return str, or plain data: dict, list, numbers, a dataclass or a pydantic model",
    )


def _too_large(what: str, size: int, limit: int) -> LimitExceededError:
    return LimitExceededError(
        what,
        size,
        limit,
        "bytes",
        hint="let the tool return less, or raise `max_result_bytes` in the agent's tool",
    )
