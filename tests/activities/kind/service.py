"""An HTTP service that answers as a test says: with errors, garbage, too much, or never."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest_asyncio

Writer = asyncio.StreamWriter
Play = Callable[[Writer], Awaitable[None]]
Answer = bytes | Play
"""Bytes as they go out, or what writes them."""


def http(body: str | bytes = "", status: str = "200 OK", **headers: str) -> bytes:
    """Return an answer with the length of its body; `content_type` is the header Content-Type."""
    raw = body.encode() if isinstance(body, str) else body
    lines = [f"{name.replace('_', '-').title()}: {value}" for name, value in headers.items()]
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(raw)}", *lines])
    return f"{head}\r\n\r\n".encode() + raw


def as_json(value: Any, status: str = "200 OK", **headers: str) -> bytes:
    """Return an answer of JSON."""
    return http(json.dumps(value, indent=1), status, content_type="application/json", **headers)


@dataclass(frozen=True)
class Seen:
    """One request as it came in; `at` is on the monotonic clock, in seconds."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    at: float

    @property
    def json(self) -> Any:
        """Return the body, which is JSON."""
        return json.loads(self.body)


@dataclass
class Service:
    """A running service; each path, without query, has its answers: the last one is for ever."""

    url: str = ""
    answers: dict[str, Sequence[Answer]] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    connections: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Some client has closed its connection."""

    @property
    def last(self) -> Seen:
        """Return the last request."""
        return self.seen[-1]

    def serve(self, document: dict[str, Any], **answers: Answer) -> None:
        """Have a document at `/openapi.json`; the answers are of the paths `/NAME`."""
        self.answers["/openapi.json"] = [as_json(document)]
        self.answers |= {f"/{path}": [answer] for path, answer in answers.items()}

    def calls(self) -> list[Seen]:
        """Return the requests that were not for the document."""
        return [each for each in self.seen if not each.target.startswith("/openapi.json")]

    async def handle(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        """Answer the requests of one connection."""
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                seen = await _request(reader)
                path = seen.target.partition("?")[0]
                before = sum(each.target.partition("?")[0] == path for each in self.seen)
                self.seen.append(seen)
                listed = self.answers.get(path) or [http("no such path", "404 Not Found")]
                answer = listed[min(before, len(listed) - 1)]
                if isinstance(answer, bytes):
                    writer.write(answer)
                    await writer.drain()
                else:
                    await self._play(answer, reader, writer)
        self.ended.set()
        writer.close()

    async def _play(self, answer: Play, reader: asyncio.StreamReader, writer: Writer) -> None:
        """Play an answer until it ends, or the client goes away."""
        playing = asyncio.ensure_future(answer(writer))
        leaving = asyncio.ensure_future(reader.read(1))
        await asyncio.wait({playing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        for task in (playing, leaving):
            task.cancel()
        await asyncio.gather(playing, leaving, return_exceptions=True)
        raise ConnectionResetError


async def _request(reader: asyncio.StreamReader) -> Seen:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip().split("\r\n")
    method, target, _ = first.split(" ", 2)
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Seen(method, target, headers, body, time.monotonic())


async def hang(writer: Writer) -> None:
    """Never answer."""
    await asyncio.Event().wait()


async def drop(writer: Writer) -> None:
    """Close the connection without an answer."""


def flood(head: bytes, chunk: bytes, count: int) -> Play:
    """Return an answer of many chunks."""

    async def play(writer: Writer) -> None:
        writer.write(head)
        for _ in range(count):
            writer.write(chunk)
            await writer.drain()

    return play


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Service]:
    """Run a service on a port of its own."""
    found = Service()
    server = await asyncio.start_server(found.handle, "127.0.0.1", 0, limit=2**22)
    found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield found
    finally:
        server.close()


@pytest_asyncio.fixture
async def service() -> AsyncIterator[Service]:
    """Return a running service."""
    async with running() as found:
        yield found


def document(
    operations: dict[str, Any] | None = None, *, version: str = "3.1.0", **more: Any
) -> dict[str, Any]:
    """Return a document; `get_fruit={...}` is the operation `get_fruit`, `GET /fruit`."""
    found: dict[str, Any] = {
        "openapi": version,
        "info": {"title": "Shop", "version": "1"},
        "paths": {},
    }
    for name, operation in {**(operations or {}), **more}.items():
        method, _, rest = name.partition("_")
        item = found["paths"].setdefault(operation.get("path", f"/{rest}"), {})
        given = {key: value for key, value in operation.items() if key != "path"}
        item[method] = {"operationId": name, "responses": {}, **given}
    return found


def parameter(name: str, place: str = "query", **given: Any) -> dict[str, Any]:
    """Return a parameter, a text unless it has a `schema`."""
    found = {"name": name, "in": place, "schema": {"type": "string"}, **given}
    return found | ({"required": True} if place == "path" else {})


def body(schema: Any, media_type: str = "application/json", **given: Any) -> dict[str, Any]:
    """Return a request body."""
    return {"required": True, "content": {media_type: {"schema": schema}}, **given}
