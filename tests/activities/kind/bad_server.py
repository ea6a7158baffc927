"""MCP servers that misbehave over stdio, each in its own way. It needs nothing but Python.

`python bad_server.py WAY`
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

LOOP = {"type": "object", "$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
SCHEMAS: dict[str, Any] = {
    "list": {"type": "array"},
    "nonsense": {"type": "object", "properties": {"a": {"type": 5}}},
    "nothing": {"required": 5},
    "loop": LOOP,
    "elsewhere": {"type": "object", "$ref": "http://127.0.0.1:9/schema"},
    "large": {"type": "object", "description": "x" * 200_000},
    "text": "any",
}
way = sys.argv[1]
listings: list[str | None] = []


def write(line: str) -> None:
    """Print one line."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def say(**fields: Any) -> None:
    """Print one message."""
    write(json.dumps({"jsonrpc": "2.0", **fields}))


def tool(name: str = "do", schema: Any = None) -> dict[str, Any]:
    """Return a tool as it is listed."""
    return {"name": name, "inputSchema": schema or {"type": "object"}}


def tools(cursor: str | None) -> dict[str, Any]:
    """Return one page of the list."""
    if way in SCHEMAS:
        return {"tools": [tool(schema=SCHEMAS[way])]}
    if way == "many":
        return {"tools": [tool(f"do_{number}") for number in range(2_000)]}
    if way == "twice":
        return {"tools": [tool(), tool()]}
    if way == "odd name":
        return {"tools": [tool("do it!")]}
    if way == "pages":
        number = int(cursor or 0)
        return {"tools": [tool(f"do_{number}")], "nextCursor": str(number + 1)}
    if way == "two pages" and cursor is None:
        return {"tools": [tool("first")], "nextCursor": "more"}
    if way == "changes" and len(listings) > 1:
        schema = {"type": "object", "required": ["why"], "properties": {"why": {"type": "string"}}}
        return {"tools": [tool(schema=schema)]}
    if way == "vanishes" and len(listings) > 1:
        return {"tools": [tool("other")]}
    return {"tools": [tool()]}


def answer(number: int) -> None:
    """Answer a call of a tool."""
    if way == "no such tool":
        say(id=number, error={"code": -32602, "message": "Unknown tool: do"})
    elif way == "no such method":
        say(id=number, error={"code": -32601, "message": "Method not found"})
    elif way == "bug":
        say(id=number, error={"code": -32603, "message": "division by zero"})
    elif way == "no mcp":
        say(id=number, result={"content": "done"})
    elif way == "asks":
        message = {"role": "user", "content": {"type": "text", "text": "Which?"}}
        say(id=99, method="sampling/createMessage", params={"messages": [message], "maxTokens": 9})
        refused = json.loads(sys.stdin.readline())
        say(id=number, result=text(f"refused: {refused['error']['message']}"))
    elif way == "asks on":
        for asked in range(100, 100_000):
            say(id=asked, method="ping")
    elif way in ("changes", "vanishes"):
        say(method="notifications/tools/list_changed")
        say(id=number, result=text("done"))
    elif way == "odd parts":
        linked = {"type": "resource_link", "uri": "file:///a.csv", "name": "a", "size": 1_000}
        held = {"uri": "file:///b.txt", "mimeType": "text/plain", "text": "four"}
        parts = [linked, {"type": "resource", "resource": held}]
        say(id=number, result={"content": parts, "structuredContent": {"rows": 2}})
    elif way == "long line":
        while True:
            sys.stdout.write("x" * 100_000)
    elif way == "deaf":
        os.close(0)
        time.sleep(600)
    else:
        say(id=number, result=text(f"done by {os.getpid()}"))


def text(said: str) -> dict[str, Any]:
    """Return a result that is one text."""
    return {"content": [{"type": "text", "text": said}]}


def main() -> None:
    """Answer until the end of standard input."""
    if way == "dies":
        sys.stderr.write("no licence for " + os.environ["TOKEN"])
        sys.stderr.flush()
        raise SystemExit(4)
    if way == "floods":
        while True:
            write("Loading plug-ins ...")
    if way == "bytes":
        sys.stdout.buffer.write(b"\xff\xfe\x00\n{}\n[]\n\n")
    if way == "greets":
        write("Welcome to the server!")
    if way == "stays":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for line in iter(sys.stdin.readline, ""):
        message = json.loads(line)
        method, number = message["method"], message.get("id")
        if method == "initialize":
            version = message["params"]["protocolVersion"]
            about = {"name": "bad", "version": "1"}
            result = {
                "protocolVersion": version,
                "serverInfo": about,
                "capabilities": {"tools": {}},
            }
            say(id=number, result=result)
        elif method == "tools/list":
            if way == "hangs at list":
                time.sleep(600)
            cursor = message.get("params", {}).get("cursor")
            listings.append(cursor)
            say(id=number, result=tools(cursor))
        elif method == "tools/call":
            answer(number)
        elif number is not None:
            say(id=number, error={"code": -32601, "message": "Method not found"})
    if way == "stays":
        time.sleep(600)


if __name__ == "__main__":
    main()
