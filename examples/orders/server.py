"""An MCP server with the orders of a shop, in memory.

`python -m examples.orders.server` speaks over standard input and output, as a program that the tool
worker starts; `python -m examples.orders.server PORT` speaks streamable HTTP.
"""

from __future__ import annotations

import sys
from typing import Annotated

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

KEY = "muster/idempotency-key"
"""Where Muster puts the id of a call in the request's `_meta`."""

server = MCPServer("orders", log_level="WARNING")
states = {1001: "on its way, due on Friday", 1002: "packed", 1003: "delivered"}
done: dict[str, str] = {}

Number = Annotated[int, Field(description="The order's number")]


def find(number: int) -> str:
    """Return an order's state, or say that there is no such order."""
    if number not in states:
        raise ToolError(f"no such order: {number}")
    return states[number]


@server.tool()
def track(number: Number) -> str:
    """Say where an order is."""
    return f"Order {number} is {find(number)}."


@server.tool()
def cancel(number: Number, context: Context) -> str:
    """Cancel an order that has not left yet."""
    key = str((context.request_context.meta or {}).get(KEY, ""))
    if key not in done:  # a call that is made again under its key is answered as before
        if find(number) != "packed":
            raise ToolError(f"order {number} has left: it is {find(number)}")
        states[number] = "cancelled"
        done[key] = f"Order {number} is cancelled."
    return done[key]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
