"""One session with an MCP server: a task of its own enters it, keeps it, and leaves it.

The SDK binds what it enters to the task that entered it, so a call that is cancelled must not be
that task. Calls are made by their callers' own tasks; the session outlives each of them.

A session is *suspect* once a call was cancelled in it or its server says that its tools have
changed: its tools are listed anew before the next call, which tells whether it still answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp_types import (
    CONNECTION_CLOSED,
    INTERNAL_ERROR,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    REQUEST_TIMEOUT,
    CallToolResult,
    Implementation,
    JSONRPCRequest,
    RequestParamsMeta,
    ToolListChangedNotification,
)
from pydantic import JsonValue, ValidationError

from activities.mcp.endpoint import Endpoint
from activities.mcp.http import MAX_MESSAGE_BYTES, Exchange, HttpError, exchange, http_client
from activities.mcp.listing import ListedTool, list_all
from activities.mcp.program import Program
from activities.mcp.stream import WatchedStream
from activities.tool import ModelFaultError
from contracts.error import BadInputError, MusterError, UnavailableError

IDEMPOTENCY_META = "muster/idempotency-key"
"""Where a tool call's id stands in the `_meta` of its request."""

MAX_ASKED = 10_000
"""Requests of a server's own, between two of ours: some ask often for a sign of life."""

MAX_GARBAGE = 1_000
"""Lines that are no MCP, which a server may print in one session: some print a greeting."""

CLOSE_GRACE_S = 3.0
"""How long a session may take to say goodbye; `program` takes its own time after that."""

PROBE_S = 5.0
"""How long a suspect session has to list its tools."""

for _noisy in ("mcp", "client", "httpx2", "httpcore2"):
    # They log each line of a server that prints garbage; what matters becomes an error of ours.
    logging.getLogger(_noisy).setLevel(logging.CRITICAL)


class SessionLostError(UnavailableError):
    """The server no longer knows the session, so it has not done what it was asked."""

    def __init__(self, shown: str, refusal: HttpError) -> None:
        super().__init__(f"MCP server {shown!r} has lost the session")
        self.refusal = refusal


class Session:
    """A session, from when it begins to connect until its task has ended."""

    def __init__(
        self, endpoint: Endpoint, scrub: Callable[[str], str], on_end: Callable[[Session], None]
    ) -> None:
        self.endpoint = endpoint
        self.users = 0
        self.is_suspect = False
        self.tools: dict[str, ListedTool] = {}
        self.listed_at = 0.0
        self._scrub = scrub
        self._on_end = on_end
        self._closing = asyncio.Event()
        self._is_ready = asyncio.Event()
        self._garbage = 0
        self._client: Client | None = None
        self._program: Program | None = None
        self._failure: Exception | None = None
        self._named: list[Any] = []
        self._asked = 0
        self._connecting = anyio.CancelScope()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_closing(self) -> bool:
        """Say whether no call should begin in it any more."""
        return self._closing.is_set()

    def open(self, timeout_s: float) -> None:
        """Begin to connect."""
        self._task = asyncio.create_task(self._live(timeout_s), name=f"mcp {self.endpoint.shown}")

    def close(self) -> None:
        """Let it end: its task goes on for some seconds."""
        if self._is_ready.is_set():
            self._closing.set()
        else:
            self._fail(UnavailableError(f"MCP server {self.endpoint.shown!r} is not wanted now"))

    async def ended(self) -> None:
        """Wait until it has ended."""
        assert self._task is not None
        await asyncio.wait({self._task})

    async def ready(self) -> None:
        """Wait until it is connected; raises what it failed with: a MusterError or HttpError."""
        await self._is_ready.wait()
        if self._failure is not None:
            raise self._failure

    async def list_tools(self) -> None:
        """Ask anew which tools there are; raises MusterError or HttpError."""
        async with self._exchange() as client:
            self.tools = await list_all(client, self.endpoint.shown)
        self.listed_at = asyncio.get_running_loop().time()
        self.is_suspect = False

    async def answers(self) -> bool:
        """Say whether a suspect session can be used: it lists its tools in time."""
        try:
            async with asyncio.timeout(PROBE_S):
                await self.list_tools()
        except (TimeoutError, MusterError, HttpError):
            return False
        return True

    async def call(
        self, tool: str, arguments: Mapping[str, JsonValue], idempotency_key: str
    ) -> CallToolResult:
        """Call a tool; raises MusterError, HttpError or ModelFaultError.

        A caller that is cancelled leaves the server told so, and the session suspect.
        """
        try:
            async with self._exchange() as client:
                return await client.call_tool(
                    tool,
                    dict(arguments),
                    progress_callback=_ignore,  # asks for progress, which keeps proxies awake
                    meta=cast("RequestParamsMeta", {IDEMPOTENCY_META: idempotency_key}),
                )
        except asyncio.CancelledError:
            self.is_suspect = True
            raise

    @asynccontextmanager
    async def _exchange(self) -> AsyncIterator[Client]:
        """Give out the client; what goes wrong with it is raised as an error of ours."""
        assert self._client is not None
        self._asked = 0
        current = Exchange()
        token = exchange.set(current)
        try:
            yield self._client
        except (MCPError, ValidationError, RuntimeError, OSError) as error:
            raise self._explained(error, current.failure) from None
        finally:
            exchange.reset(token)

    async def _live(self, timeout_s: float) -> None:
        current = Exchange()
        exchange.set(current)
        with self._connecting as scope:
            scope.deadline = anyio.current_time() + timeout_s
            try:
                async with self._connected() as client:
                    self.tools = await list_all(client, self.endpoint.shown)
                    self.listed_at = anyio.current_time()
                    self._client = client
                    scope.deadline = float("inf")
                    self._is_ready.set()
                    await self._closing.wait()
                    scope.deadline = anyio.current_time() + CLOSE_GRACE_S
            except Exception as error:  # also the groups of errors that the SDK's tasks end with
                if not self._is_ready.is_set():
                    self._failure = self._explained(error, current.failure)
        if scope.cancelled_caught and not self._is_ready.is_set():
            self._failure = UnavailableError(
                f"MCP server {self.endpoint.shown!r} did not connect and list its tools within "
                f"{timeout_s:g} s{self._last_words()}",
                hint="if it needs longer to start, raise `list_timeout`",
            )
        self._closing.set()
        self._is_ready.set()
        self._on_end(self)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Client]:
        endpoint = self.endpoint
        if endpoint.url:
            async with (
                http_client(endpoint) as http,
                self._speaking(
                    streamable_http_client(
                        endpoint.url, http_client=http, max_sse_event_size=MAX_MESSAGE_BYTES
                    )
                ) as client,
            ):
                yield client
            return
        self._program = program = Program(endpoint, self._scrub)
        async with self._speaking(program.speaking(self._fail)) as client:
            yield client

    def _speaking(self, transport: Any) -> Client:
        return Client(
            WatchedStream.over(transport, self._see, self._closing.set),
            cache=None,
            message_handler=self._hear,
            client_info=Implementation(name="muster", version="1"),
        )

    def _see(self, message: Any) -> None:
        """Count a server's own requests; note how the tools of a list are named.

        An error of the SDK says only which place in the list it is about.
        """
        content = getattr(message, "message", None)
        if isinstance(content, JSONRPCRequest):
            self._asked += 1
            if self._asked > MAX_ASKED:
                self._fail(
                    BadInputError(
                        f"MCP server {self.endpoint.shown!r} has asked for something "
                        f"{self._asked:,} times, the limit is {MAX_ASKED:,} times"
                    )
                )
        result = getattr(content, "result", None)
        if isinstance(result, dict) and isinstance(tools := result.get("tools"), list):
            self._named = [each.get("name") if isinstance(each, dict) else None for each in tools]

    async def _hear(self, message: object) -> None:
        """Take what the server says of its own accord."""
        if isinstance(message, ToolListChangedNotification):
            self.is_suspect = True
        elif isinstance(message, Exception):
            self._garbage += 1
            if self._garbage > MAX_GARBAGE:
                self._fail(
                    BadInputError(
                        f"MCP server {self.endpoint.shown!r} has printed more than "
                        f"{MAX_GARBAGE:,} lines that are no MCP",
                        hint="let it print its log to standard error",
                    )
                )

    def _fail(self, error: Exception) -> None:
        """Note why the session cannot go on, and end it; the first reason counts."""
        self._failure = self._failure or error
        self._closing.set()
        if not self._is_ready.is_set():
            self._is_ready.set()
            self._connecting.cancel()

    def _explained(self, error: BaseException, noted: Exception | None) -> Exception:
        """Return an error of the SDK as one of ours: what HTTP said tells more, if it said no."""
        shown = self.endpoint.shown
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if self._failure is not None:
            return self._failure
        if self.is_closing and isinstance(error, RuntimeError):  # it ended before it was asked
            return self._ended()
        if noted is not None:
            return self._refused(error, noted)
        match error:
            case MusterError() | HttpError() | ModelFaultError():
                return error
            case MCPError(code=code) if code == CONNECTION_CLOSED:
                return self._ended()
            case MCPError(code=code) if code == REQUEST_TIMEOUT:
                return UnavailableError(f"MCP server {shown!r}: {error}")
            case MCPError(code=code) if code in (INTERNAL_ERROR, PARSE_ERROR):
                return BadInputError(f"MCP server {shown!r} failed: {error}")
            case MCPError():
                return ModelFaultError(f"MCP server {shown!r} refuses: {error}")
            case ValidationError():
                return BadInputError(
                    f"MCP server {shown!r} answers what is no MCP: {self._first(error)}"
                )
            case OSError():
                return BadInputError(
                    f"MCP server {shown!r} cannot be started: {error.strerror or error}",
                    hint="its program is looked for where the tool worker was started, and in PATH",
                )
        return BadInputError(f"MCP server {shown!r}: {error or type(error).__name__}")

    def _refused(self, error: BaseException, noted: Exception) -> Exception:
        if not isinstance(noted, HttpError) or self._client is None:
            return noted
        status, text = noted.response.status_code, noted.response.text
        if isinstance(error, MCPError) and error.code == METHOD_NOT_FOUND:
            return noted  # a server without sessions, or one that does not know the method
        if status == 404 or (status == 400 and "session" in text.lower()):
            return SessionLostError(self.endpoint.shown, noted)
        return noted

    def _first(self, error: ValidationError) -> str:
        """Return the first problem of many, without the value."""
        found = error.errors(include_url=False, include_input=False)[0]
        parts = list(found["loc"])
        match parts:
            case ["tools", int(number), *others] if number < len(self._named):
                parts = [f"tool {self._named[number]!r}", *others]
        place = ", ".join(str(part) for part in parts)
        return f"{place}: {found['msg']}" if place else found["msg"]

    def _ended(self) -> Exception:
        status = self._program.status if self._program is not None else ""
        return UnavailableError(
            f"MCP server {self.endpoint.shown!r} ended{status}{self._last_words()}"
        )

    def _last_words(self) -> str:
        return self._program.last_words if self._program is not None else ""


async def _ignore(progress: float, total: float | None, message: str | None) -> None:
    """Take a report of progress; the heartbeat of the call does not wait for any."""
