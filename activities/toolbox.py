"""All tools of one worker: each kind behind the same few calls."""

from __future__ import annotations

from asyncio import Lock
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from activities.kind.activity import ActivityTools
from activities.kind.function import FunctionTools
from activities.kind.openapi import OpenApiTools
from activities.kind.sql import SqlTools
from activities.secret import Secrets
from activities.thread import start_thread
from activities.tool import LoadedTool, ServedTool, ToolKind
from contracts.agent import ToolRef
from contracts.error import BadInputError

if TYPE_CHECKING:
    from activities.kind.mcp import McpTools


class Toolbox:
    """Finds the kind of a tool; an asynchronous context, which closes what the kinds keep.

    `secrets` are those that its kinds have read: what leaves the worker is scrubbed by them.
    """

    def __init__(self) -> None:
        self.secrets = Secrets()
        self._servers: McpTools | None = None
        self._importing = Lock()
        self._kinds: dict[str, ToolKind] = {
            "function": FunctionTools(),
            "openapi": OpenApiTools(self.secrets),
            "sql": SqlTools(self.secrets),
            "activity": ActivityTools(),
        }

    async def __aenter__(self) -> Self:
        """Open nothing yet."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close every kind."""
        for kind in self._kinds.values():
            await kind.close()
        if self._servers is not None:
            await self._servers.close()

    async def describe(self, ref: ToolRef, tenant: str) -> Sequence[ServedTool]:
        """Return what the model is told of a tool, or of the tools of a server, as a tenant has it.

        Raises MusterError.
        """
        return await (await self._kind(ref, tenant)).describe(ref)

    async def load(self, ref: ToolRef, tenant: str) -> LoadedTool:
        """Return a tool ready to be called for a tenant; raises MusterError."""
        return await (await self._kind(ref, tenant)).load(ref)

    async def _kind(self, ref: ToolRef, tenant: str) -> ToolKind:
        if ref.mcp:
            return (await self._mcp()).of(tenant)
        kind = self._kinds.get(ref.kind)
        if kind is None:
            raise BadInputError(
                f"tool {ref.shown!r}: this version has no tools of kind {ref.kind!r}",
                hint=f"the kinds are {', '.join((*self._kinds, 'mcp'))}",
            )
        return kind

    async def _mcp(self) -> McpTools:
        """Return the tools of MCP servers, imported when they are first asked for."""
        async with self._importing:
            if self._servers is None:
                imported = await start_thread(_import_mcp, "import mcp")
                if imported.error is not None:
                    raise imported.error
                self._servers = imported.value(self.secrets)
            return self._servers


def _import_mcp() -> type[McpTools]:
    # It takes a second and 40 MB, which a worker without such tools does not need.
    from activities.kind.mcp import McpTools

    return McpTools
