"""What the tests of activities share: running one as Temporal would, and a small HTTP server."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import pytest_asyncio
from temporalio.testing import ActivityEnvironment

from activities.call_tool import CallTool
from activities.toolbox import Toolbox
from contracts.agent import OnFailure, RetryPolicy, ToolRef
from contracts.message import ToolCall
from contracts.tool import CallToolInput, CallToolResult
from store.database import Database

GOOD, BAD = "tests.activities.good_tool", "tests.activities.bad_tool"
_tokens = itertools.count(1)


def environment(*, attempt: int = 1) -> ActivityEnvironment:
    """Return an environment with a task token of its own and roomy timeouts."""
    found = ActivityEnvironment()
    found.info = dataclasses.replace(
        found.info,
        attempt=attempt,
        task_token=str(next(_tokens)).encode(),
        start_to_close_timeout=timedelta(minutes=2),
    )
    return found


def request(
    function: str,
    arguments: dict[str, Any] | None = None,
    *,
    module: str = BAD,
    call_id: str = "job-1/b/1/0",
    on_failure: OnFailure = OnFailure.TELL_MODEL,
    max_attempts: int = 4,
    **policy: Any,
) -> CallToolInput:
    """Return the input of one call of a test tool."""
    tool = ToolRef(
        function=f"{module}:{function}",
        on_failure=on_failure,
        retry=RetryPolicy(max_attempts=max_attempts),
        **policy,
    )
    call = ToolCall(id=call_id, tool=tool.tool_name, arguments=arguments or {})
    return CallToolInput(job_id="job-1", call=call, tool=tool)


Caller = Callable[[CallToolInput], Awaitable[CallToolResult]]


@pytest.fixture
def tools(database: Database) -> CallTool:
    """Return the activity class on a fresh database."""
    return CallTool(database, Toolbox())


@pytest.fixture
def call(tools: CallTool) -> Caller:
    """Return a function that makes one attempt at a call, each under a new task token."""

    async def attempt(call_input: CallToolInput) -> CallToolResult:
        return await environment().run(tools.call_tool, call_input)

    return attempt


class HttpServer:
    r"""A local HTTP server that gives its `answers` in order, then the last one for ever.

    An answer is status, headers, an empty line and the body: `404 Not Found\n\nno such customer`.
    """

    def __init__(self) -> None:
        self.answers: Sequence[str] = ()
        self.requests = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection."""
        await reader.readuntil(b"\r\n\r\n")
        place = min(self.requests, len(self.answers) - 1)
        self.requests += 1
        head, _, body = self.answers[place].partition("\n\n")
        head = head.replace("\n", "\r\n")
        length = f"Content-Length: {len(body.encode())}\r\nConnection: close"
        writer.write(f"HTTP/1.1 {head}\r\n{length}\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()


@pytest_asyncio.fixture
async def http_server() -> AsyncIterator[HttpServer]:
    """Return a running local HTTP server."""
    found = HttpServer()
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with server:
        yield found
