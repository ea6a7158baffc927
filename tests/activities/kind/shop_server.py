"""A well-behaved MCP server, written with the `mcp` package: over stdio, or HTTP on a given port.

`python -m tests.activities.kind.shop_server [PORT [json]]`
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel

server = MCPServer("shop")


class Price(BaseModel):
    """What something costs."""

    item: str
    cents: int


def _leave(path: str) -> None:
    Path(path).touch()


@server.tool()
def customer(number: int) -> str:
    """Return a customer's name."""
    if number != 7:
        raise ToolError(f"no such customer: {number}")
    return "Ada"


@server.tool()
def price(item: str) -> Price:
    """Return what an item costs."""
    return Price(item=item, cents=250)


@server.tool()
def picture() -> Image:
    """Return a picture."""
    return Image(data=b"\x89PNG" * 25, format="png")


@server.tool()
async def pay(cents: int, context: Context) -> str:
    """Take a payment, once for each idempotency key."""
    meta = dict(context.request_context.meta or {})
    return f"paid {cents} under {meta.get('muster/idempotency-key')}"


@server.tool()
def who() -> str:
    """Return which process this is, and what it knows of its environment."""
    names = ("SHOP_TENANT", "SHOP_TOKEN", "MUSTER_DATABASE_URL")
    known = " ".join(f"{name}={os.environ.get(name)}" for name in names)
    return f"{os.getpid()} {' '.join(sys.argv[1:])} {known}"


@server.tool()
async def wait(started: str, cancelled: str, context: Context) -> str:
    """Wait for ever; leave a file when it starts, and one when it is told to stop."""
    await context.report_progress(1, 2)
    _leave(started)
    try:
        await asyncio.Event().wait()
    except BaseException:
        _leave(cancelled)
        raise
    return "never"


@server.tool()
def stand_still(started: str) -> str:
    """Stop the whole process, as a server that hangs does."""
    Path(started).touch()
    os.kill(os.getpid(), signal.SIGSTOP)
    return "went on"


@server.tool()
async def crash() -> str:
    """End the process in the middle of a call."""
    sys.stderr.write("out of paper\n")
    sys.stderr.flush()
    os._exit(3)


@server.tool()
def child() -> str:
    """Start a process that lives on when the server ends, and return its id."""
    program = "import time; time.sleep(600)"
    return str(subprocess.Popen([sys.executable, "-c", program]).pid)


@server.tool()
def large(size: int) -> str:
    """Return a long text."""
    return "x" * size


def main(arguments: list[str]) -> None:
    """Serve until the end of standard input, or until told to stop."""
    if arguments and arguments[0].isdecimal():
        server.run(
            "streamable-http",
            host="127.0.0.1",
            port=int(arguments[0]),
            json_response="json" in arguments,
        )
    else:
        server.run("stdio")


if __name__ == "__main__":
    main(sys.argv[1:])
