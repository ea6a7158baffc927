"""What all kinds of tools have in common: what the model is told of one, and how it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import JsonValue

from contracts.agent import ToolRef, ToolSchema


class ModelFaultError(ValueError):
    """The tool says no to what the model asks, and would again; the text is for the model."""


class WrongArgumentsError(ModelFaultError):
    """The model's arguments do not fit the tool; the text says what was expected."""


@dataclass(frozen=True, slots=True)
class ServedTool:
    """A tool as its source describes it: `remote` is its name there, for tools of a server.

    The schema's name is what the model may call it; a prefix may still come before it.
    """

    schema: ToolSchema
    remote: str | None = None


@dataclass(frozen=True, slots=True)
class LoadedTool:
    """A tool ready to be called.

    `bind` takes the model's arguments and the idempotency key and returns the call itself, or
    raises WrongArgumentsError. The call returns what `result.render` makes into text, or an
    awaitable of it; unless `is_async`, it is made in a thread of its own. What `is_foreign` is code
    that others wrote: it is awaited on another loop than the worker's, which it may block.
    """

    name: str
    is_async: bool
    bind: Callable[[Mapping[str, JsonValue], str], Callable[[], Any]]
    is_foreign: bool = False


class ToolKind(Protocol):
    """One way in which tools come to us.

    Both methods raise `MusterError`, which names the tool; a retryable one if it may pass.
    """

    async def describe(self, ref: ToolRef) -> Sequence[ServedTool]:
        """Return the tool, or the tools of a server, asked anew."""

    async def load(self, ref: ToolRef) -> LoadedTool:
        """Return the tool ready to be called; `ref` names one tool."""

    async def close(self) -> None:
        """Give up what is kept between calls; no call runs any more."""
