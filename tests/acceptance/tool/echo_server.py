"""An MCP server over stdio that gives away the secret it was started with."""

from __future__ import annotations

import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

TOKEN = os.environ["TOKEN"]
server = MCPServer("echo")


@server.tool(description=f"Return {TOKEN}, which the argument is by default.")
def mcp_says(text: str = TOKEN) -> str:
    """Return it."""
    return f"{text} {TOKEN} {' '.join(sys.argv[1:])}"


@server.tool()
def mcp_refuses() -> str:
    """Say no."""
    raise ToolError(f"no such customer: {TOKEN}")


@server.tool()
def mcp_dies() -> str:
    """Print it and end."""
    sys.stderr.write(f"no licence for {TOKEN}\n")
    sys.stderr.flush()
    os._exit(4)


if __name__ == "__main__":
    server.run("stdio")
