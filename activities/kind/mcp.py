"""Tools of MCP servers: listed when a job opens, called in sessions that are kept between calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pydantic import JsonValue
from pydantic_core import to_json

from activities.error_map import FailureKind, classify
from activities.kind.json_schema import check_arguments, check_schema
from activities.kind.told_schema import told_schema
from activities.mcp.answer import answer_of
from activities.mcp.endpoint import Endpoint, endpoint_of
from activities.mcp.http import HttpError
from activities.mcp.listing import ListedTool
from activities.mcp.pool import SessionPool
from activities.mcp.session import Session
from activities.secret import Secrets
from activities.thread import start_thread
from activities.tool import LoadedTool, ModelFaultError, ServedTool, ToolKind
from contracts.agent import ToolRef, ToolSchema
from contracts.error import BadInputError, LimitExceededError, UnavailableError
from contracts.limit import MAX_TOOLS, MAX_TOOLSET_BYTES

MAX_DESCRIPTION_CHARS = 4_000
"""How much of a server's description of a tool the model is shown."""

MAX_SCHEMA_BYTES = 100_000
"""One tool's schema as JSON: the model reads it at each step."""

FRESH_S = 1.0
"""A list of tools of this age is not asked for again when a job opens."""


class McpTools:
    """Keeps the sessions of all tenants; `of` gives one tenant's tools."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._pool = SessionPool(secrets.scrub)

    def of(self, tenant: str) -> ToolKind:
        """Return the tools of MCP servers as one tenant has them."""
        return _TenantTools(tenant, self._secrets, self._pool)

    async def close(self) -> None:
        """End all sessions, with their server processes."""
        await self._pool.close()


class _TenantTools:
    """The kind, for one tenant."""

    def __init__(self, tenant: str, secrets: Secrets, pool: SessionPool) -> None:
        self._tenant, self._secrets, self._pool = tenant, secrets, pool

    async def describe(self, ref: ToolRef) -> Sequence[ServedTool]:
        """Return the server's tools, or the one that `remote` names; raises MusterError."""
        endpoint = endpoint_of(ref, self._tenant, self._secrets)
        timeout_s = _list_timeout_s(ref)

        async def list_all(session: Session) -> Mapping[str, ListedTool]:
            await _list_anew(session, timeout_s)
            return session.tools

        try:
            listed = await self._pool.use(endpoint, timeout_s, list_all)
        except HttpError as error:
            if classify(error).kind is FailureKind.TRANSIENT:
                raise UnavailableError(str(error)) from None
            raise BadInputError(
                str(error), hint="is its `url` the one of the MCP endpoint, and is it allowed?"
            ) from None
        except ModelFaultError as error:
            raise BadInputError(str(error)) from None
        chosen = _chosen(ref, endpoint, listed)
        ended = await start_thread(  # which takes a second for a large one
            lambda: [self._served(endpoint, name, tool) for name, tool in chosen], "mcp schemas"
        )
        if ended.error is not None:
            raise ended.error
        served: list[ServedTool] = ended.value
        names = {tool.name for _, tool in chosen}
        # The others are told by their names alone, so that one that was misspelt finds its like.
        return [*served, *(_unchosen(name) for name in listed if ref.tools and name not in names)]

    async def load(self, ref: ToolRef) -> LoadedTool:
        """Return the tool; its server is asked when it is called, within the tool's timeout."""
        assert ref.remote is not None
        remote = ref.remote

        def bind(arguments: Mapping[str, JsonValue], key: str) -> Callable[[], Awaitable[Any]]:
            return lambda: self._call(ref, remote, arguments, key)

        return LoadedTool(name=ref.tool_name, is_async=True, bind=bind)

    async def close(self) -> None:
        """The sessions belong to all tenants."""

    async def _call(
        self, ref: ToolRef, remote: str, arguments: Mapping[str, JsonValue], key: str
    ) -> str:
        """Return what the tool answers; raises ModelFaultError, HttpError or MusterError."""
        endpoint = endpoint_of(ref, self._tenant, self._secrets)

        async def call(session: Session) -> str:
            if remote not in session.tools:
                await session.list_tools()
            tool = session.tools.get(remote)
            if tool is None:
                gone = f"MCP server {endpoint.shown!r} has no tool {remote!r} any more"
                raise ModelFaultError(gone)
            check_arguments(ref.tool_name, tool.arguments, arguments)
            return answer_of(await session.call(remote, arguments, key))

        return await self._pool.use(endpoint, _list_timeout_s(ref), call)

    def _served(self, endpoint: Endpoint, name: str, tool: ListedTool) -> ServedTool:
        """Return what the model is told of a tool; raises MusterError if its schema is none."""
        shown = f"{tool.name} of MCP server {endpoint.shown}"
        if (size := len(to_json(tool.arguments))) > MAX_SCHEMA_BYTES:
            raise LimitExceededError(
                f"the schema of tool {shown!r}, as JSON,",
                size,
                MAX_SCHEMA_BYTES,
                "bytes",
                hint="leave it out: choose others with `tools: [...]`",
            )
        check_schema(shown, tool.arguments)
        description = self._secrets.scrub(tool.description)[:MAX_DESCRIPTION_CHARS]
        told = told_schema(shown, tool.arguments)
        return ServedTool(_schema(name, description, told), remote=tool.name)


def _schema(name: str, description: str, arguments: dict[str, Any]) -> ToolSchema:
    """Return a schema whose name is not checked yet: a prefix may come before it."""
    return ToolSchema.model_construct(name=name, description=description, arguments=arguments)


def _unchosen(name: str) -> ServedTool:
    return ServedTool(_schema(name, "", {}), remote=name)


def _chosen(
    ref: ToolRef, endpoint: Endpoint, listed: Mapping[str, ListedTool]
) -> list[tuple[str, ListedTool]]:
    """Return the tools that an entry stands for, by the names they get; raises MusterError."""
    if ref.remote is not None:
        return [(ref.tool_name, _find(endpoint, listed, ref.remote))]
    chosen = [each for each in listed.values() if not ref.tools or each.name in ref.tools]
    for size, limit, unit in (
        (len(chosen), MAX_TOOLS, "tools"),
        (sum(len(to_json(each.arguments)) for each in chosen), MAX_TOOLSET_BYTES, "bytes"),
    ):
        if size > limit:
            raise LimitExceededError(
                f"the list of MCP server {endpoint.shown!r}",
                size,
                limit,
                unit,
                hint="choose some with `tools: [...]`",
            )
    return [(each.name, each) for each in chosen]


def _find(endpoint: Endpoint, listed: Mapping[str, ListedTool], remote: str) -> ListedTool:
    if remote not in listed:
        known = ", ".join(list(listed)[:MAX_TOOLS]) or "none"
        raise BadInputError(
            f"MCP server {endpoint.shown!r} has no tool {remote!r}", hint=f"it has: {known}"
        )
    return listed[remote]


async def _list_anew(session: Session, timeout_s: float) -> None:
    """Ask which tools there are now, unless that was just asked; raises MusterError, HttpError."""
    if asyncio.get_running_loop().time() - session.listed_at < FRESH_S:
        return
    try:
        async with asyncio.timeout(timeout_s):
            await session.list_tools()
    except TimeoutError:
        session.is_suspect = True
        raise UnavailableError(
            f"MCP server {session.endpoint.shown!r} did not list its tools within {timeout_s:g} s",
            hint="if it needs longer, raise `list_timeout`",
        ) from None


def _list_timeout_s(ref: ToolRef) -> float:
    assert ref.mcp is not None
    return ref.mcp.list_timeout.total_seconds()
