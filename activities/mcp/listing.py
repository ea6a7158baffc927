"""What tools a server has: all pages of its list, bounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mcp import Client

from contracts.error import BadInputError, LimitExceededError

MAX_PAGES = 100
MAX_LISTED_TOOLS = 5_000
MAX_LISTED_BYTES = 16_000_000
"""What a server may list, all pages together."""


@dataclass(frozen=True, slots=True)
class ListedTool:
    """A tool as its server lists it."""

    name: str
    description: str
    arguments: dict[str, Any]


async def list_all(client: Client, shown: str) -> dict[str, ListedTool]:
    """Return all tools of a server, page by page; raises MusterError, MCPError, ValidationError."""
    found: dict[str, ListedTool] = {}
    cursor, size = None, 0
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            if tool.name in found:
                raise BadInputError(f"MCP server {shown!r} lists two tools named {tool.name!r}")
            found[tool.name] = ListedTool(tool.name, tool.description or "", tool.input_schema)
            size += len(tool.model_dump_json())
        for count, limit, unit in (
            (len(found), MAX_LISTED_TOOLS, "tools"),
            (size, MAX_LISTED_BYTES, "bytes"),
        ):
            if count > limit:
                raise LimitExceededError(f"the list of MCP server {shown!r}", count, limit, unit)
        cursor = page.next_cursor
        if cursor is None:
            return found
    raise BadInputError(f"MCP server {shown!r} lists its tools on more than {MAX_PAGES} pages")
