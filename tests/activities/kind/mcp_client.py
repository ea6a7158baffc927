"""Asking MCP servers as a tool worker does, without Temporal."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from activities.error_map import ToolFailure, classify
from activities.kind.mcp import McpTools
from activities.secret import Secrets
from contracts.agent import ToolRef
from muster.stack.port import free_port

ROOT = Path(__file__).parents[3]
DEADLINE_S = 30.0
POLL_S = 0.02
KEY = "job-1/b/1/0"


def program(*arguments: str, **mcp: Any) -> dict[str, Any]:
    """Return a server program that is a file of this folder."""
    module, *others = arguments
    command = [sys.executable, str(Path(__file__).with_name(f"{module}.py")), *others]
    return {"command": command, **mcp}


@asynccontextmanager
async def opened(**tools: Any) -> AsyncIterator[McpTools]:
    """Return the kind, closed at last."""
    found = McpTools(Secrets(), **tools)
    try:
        yield found
    finally:
        await found.close()


async def describe(
    client: McpTools, mcp: dict[str, Any], tenant: str = "a", **given: Any
) -> dict[str, dict[str, Any]]:
    """Return the schemas of a server's tools by their names there."""
    ref = ToolRef.model_validate({"mcp": mcp, **given})
    served = await client.of(tenant).describe(ref)
    return {str(each.remote): each.schema.arguments for each in served}


async def call(
    tools: McpTools,
    mcp: dict[str, Any],
    remote: str,
    *,
    tenant: str = "a",
    key: str = KEY,
    **arguments: Any,
) -> str:
    """Call one tool and return what it answers."""
    ref = ToolRef.model_validate({"mcp": mcp, "remote": remote})
    loaded = await tools.of(tenant).load(ref)
    async with asyncio.timeout(DEADLINE_S):
        answer = await loaded.bind(arguments, key)()
    assert isinstance(answer, str)
    return answer


async def failure(
    tools: McpTools, mcp: dict[str, Any], remote: str, **arguments: Any
) -> ToolFailure:
    """Call one tool that fails and return whose fault that is."""
    try:
        answer = await call(tools, mcp, remote, **arguments)
    except Exception as error:
        return classify(error)
    raise AssertionError(f"it answers {answer[:200]!r}")


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something has happened, with a bound."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(POLL_S)


def is_alive(pid: int) -> bool:
    """Say whether a process runs; one that is dead and not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


Reply = tuple[str, str]
"""Status with headers, and body: what the server below answers to one message."""


def result(message: dict[str, Any], **given: Any) -> Reply:
    """Return a plain answer to a message."""
    return "200 OK", json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": given})


def refusal(message: dict[str, Any], code: int, text: str) -> Reply:
    """Return an error of the protocol's own to a message."""
    error = {"code": code, "message": text}
    return "200 OK", json.dumps({"jsonrpc": "2.0", "id": message["id"], "error": error})


class WebServer:
    """A server that speaks streamable HTTP as badly as a test wants.

    `on_call` answers calls of tools; `on_any` may answer anything else. It has a session, named by
    `session`, and refuses messages of another one with 404.
    """

    def __init__(self) -> None:
        self.url = ""
        self.session = "first"
        self.methods: list[str] = []
        self.heads: list[str] = []
        self.tasks: set[asyncio.Task[Any]] = set()
        self.on_call: Callable[[dict[str, Any]], Reply | Awaitable[Reply]] = lambda message: result(
            message, content=[{"type": "text", "text": "done"}]
        )
        self.on_any: Callable[[dict[str, Any]], Reply | None] = lambda _: None

    def count(self, method: str) -> int:
        """Return how many messages of a kind have come."""
        return self.methods.count(method)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:-2])
            body = await reader.readexactly(int(fields.get("content-length", 0)))
            self.heads.append(head)
            status, text = "405 Method Not Allowed", ""
            if head.startswith("POST"):
                status, text = await self._answer(json.loads(body), fields)
            status, _, others = status.partition("\n")
            others = "".join(f"{line}\r\n" for line in others.splitlines())
            if "content-type" not in others.lower():
                others += "Content-Type: application/json\r\n"
            if "content-length" not in others.lower():
                others += f"Content-Length: {len(text.encode())}\r\n"
            writer.write(f"HTTP/1.1 {status}\r\n{others}Connection: close\r\n\r\n{text}".encode())
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, message: dict[str, Any], fields: dict[str, str]) -> Reply:
        method = message["method"]
        self.methods.append(method)
        if (reply := self.on_any(message)) is not None:
            return reply
        if method == "initialize":
            version = message["params"]["protocolVersion"]
            about = {"name": "web", "version": "1"}
            status, text = result(
                message, protocolVersion=version, capabilities={"tools": {}}, serverInfo=about
            )
            return f"{status}\nMcp-Session-Id: {self.session}", text
        if method.startswith("notifications/"):
            return "202 Accepted", ""
        if method == "server/discover":
            return refusal(message, -32601, "no such method")
        if fields.get("mcp-session-id") != self.session:
            return "404 Not Found", "no such session"
        if method == "tools/list":
            tool = {"name": "do", "inputSchema": {"type": "object"}}
            return result(message, tools=[tool])
        assert method == "tools/call", method
        answer = self.on_call(message)
        return answer if isinstance(answer, tuple) else await answer


@asynccontextmanager
async def web_server() -> AsyncIterator[WebServer]:
    """Return a running HTTP server of ours."""
    found = WebServer()
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
    async with server:
        yield found
        for task in (tasks := set(found.tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def shop(**mcp: Any) -> dict[str, Any]:
    """Return the well-behaved server as a program."""
    env = {"PYTHONPATH": str(ROOT), **mcp.pop("env", {})}
    command = [sys.executable, "-m", "tests.activities.kind.shop_server", *mcp.pop("more", [])]
    return {"command": command, "env": env, "list_timeout": DEADLINE_S, **mcp}


@asynccontextmanager
async def shop_on_the_web(
    *more: str, module: str = "tests.activities.kind.shop_server"
) -> AsyncIterator[dict[str, Any]]:
    """Run a well-behaved server over HTTP."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        str(port),
        *more,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not await _listens(port):
                await asyncio.sleep(POLL_S)
        yield {"url": f"http://127.0.0.1:{port}/mcp", "list_timeout": DEADLINE_S}
    finally:
        process.kill()
        await process.wait()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
