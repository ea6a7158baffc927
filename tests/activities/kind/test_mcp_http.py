"""MCP over HTTP that goes wrong: whose fault it is, how often it is tried, what is never sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
import pytest_asyncio

from activities.error_map import FailureKind
from activities.kind.mcp import McpTools
from contracts.error import BadInputError, UnavailableError
from muster.stack.port import free_port
from tests.activities.kind.mcp_client import (
    WebServer,
    call,
    describe,
    failure,
    opened,
    refusal,
    result,
    until,
    web_server,
)


@pytest_asyncio.fixture
async def web() -> AsyncIterator[WebServer]:
    """Return a server over HTTP that a test makes answer as it likes."""
    async with web_server() as found:
        yield found


@pytest_asyncio.fixture
async def tools() -> AsyncIterator[McpTools]:
    """Return the kind, closed at last."""
    async with opened() as found:
        yield found


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        ("401 Unauthorized", FailureKind.PERMANENT, "answers 401 Unauthorized: no such customer"),
        ("403 Forbidden", FailureKind.PERMANENT, "answers 403 Forbidden"),
        ("400 Bad Request", FailureKind.MODEL, "answers 400 Bad Request: no such customer"),
        ("500 Internal Server Error", FailureKind.TRANSIENT, "answers 500"),
        ("503 Service Unavailable", FailureKind.TRANSIENT, "answers 503 Service Unavailable"),
        ("429 Too Many Requests\nRetry-After: 7", FailureKind.TRANSIENT, "answers 429"),
    ],
)
async def test_refused_call_is_one_request_and_says_whose_fault_it_is(
    web: WebServer, tools: McpTools, status: str, kind: FailureKind, said: str
) -> None:
    web.on_call = lambda _: (status, "no such customer")
    found = await failure(tools, {"url": web.url}, "do")
    assert found.kind is kind
    assert said in found.text
    assert web.url in found.text
    assert web.count("tools/call") == 1
    assert (found.retry_after == timedelta(seconds=7)) is ("Retry-After" in status)


async def test_call_answered_404_is_made_in_a_new_session_and_then_told_to_the_model(
    web: WebServer, tools: McpTools
) -> None:
    """Case J3."""
    web.on_call = lambda _: ("404 Not Found", "nothing here")
    found = await failure(tools, {"url": web.url}, "do")
    assert found.kind is FailureKind.MODEL
    assert "answers 404 Not Found: nothing here" in found.text
    assert web.count("initialize") == 2
    assert web.count("tools/call") == 2


async def test_server_that_forgot_the_session_is_asked_in_a_new_one(
    web: WebServer, tools: McpTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.kind.mcp.FRESH_S", 0.0)
    mcp = {"url": web.url}
    assert await call(tools, mcp, "do") == "done"
    web.session = "second"
    assert await call(tools, mcp, "do") == "done"
    assert web.count("initialize") == 2
    web.session = "third"
    assert list(await describe(tools, mcp)) == ["do"]
    assert web.count("initialize") == 3
    assert await call(tools, mcp, "do") == "done"
    assert web.count("initialize") == 3


@pytest.mark.parametrize(
    ("reply", "kind", "said"),
    [
        (("200 OK", "<html>"), FailureKind.PERMANENT, "failed: Failed to parse JSON"),
        (("200 OK\nContent-Type: text/html", "<html>"), FailureKind.MODEL, "text/html"),
        (("202 Accepted", ""), FailureKind.MODEL, "202 Accepted"),
        (("200 OK\nContent-Length: 999", '{"json'), FailureKind.TRANSIENT, "broke off its answer"),
        (
            ("307 Temporary Redirect\nLocation: http://elsewhere.example/mcp", ""),
            FailureKind.MODEL,
            "Redirect to http://elsewhere.example/mcp not followed",
        ),
    ],
)
async def test_answer_that_is_no_mcp_is_one_clear_error(
    web: WebServer, tools: McpTools, reply: tuple[str, str], kind: FailureKind, said: str
) -> None:
    web.on_call = lambda _: reply
    found = await failure(tools, {"url": web.url}, "do")
    assert said in found.text
    assert found.kind is kind
    assert web.count("tools/call") == 1


@pytest.mark.parametrize("form", ["json", "event", "events"])
async def test_answer_without_an_end_is_cut_off(
    web: WebServer, tools: McpTools, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr("activities.mcp.http.MAX_MESSAGE_BYTES", 1_000_000)
    progress = {"progressToken": 1, "progress": 1}
    event = {"jsonrpc": "2.0", "method": "notifications/progress", "params": progress}

    def answer(message: dict[str, Any]) -> tuple[str, str]:
        status, text = result(message, content=[{"type": "text", "text": "x" * 2_000_000}])
        if form == "json":
            return status, text
        lines = [text] if form == "event" else [json.dumps(event)] * 20_000
        streamed = "".join(f"event: message\ndata: {line}\n\n" for line in lines)
        return f"{status}\nContent-Type: text/event-stream", streamed

    web.on_call = answer
    found = await failure(tools, {"url": web.url}, "do")
    assert found.kind is FailureKind.PERMANENT
    assert "answers more than 1,000,000 bytes" in found.text


async def test_unknown_tool_is_told_to_the_model(web: WebServer, tools: McpTools) -> None:
    web.on_call = lambda message: refusal(message, -32602, "Unknown tool: do")
    found = await failure(tools, {"url": web.url}, "do")
    assert found.kind is FailureKind.MODEL
    assert "refuses: Unknown tool: do" in found.text


async def test_cancelled_call_is_told_to_the_server(web: WebServer, tools: McpTools) -> None:
    async def hang(_: dict[str, Any]) -> tuple[str, str]:
        await asyncio.Event().wait()
        raise AssertionError

    web.on_call = hang
    waiting = asyncio.create_task(call(tools, {"url": web.url}, "do"))
    await until(lambda: web.count("tools/call") == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: web.count("notifications/cancelled") == 1)
    web.on_call = lambda message: result(message, content=[])
    assert await call(tools, {"url": web.url}, "do") == ""
    assert web.count("initialize") == 1


async def test_server_that_cannot_be_reached_may_come_back(tools: McpTools) -> None:
    nobody = {"url": f"http://127.0.0.1:{free_port()}/mcp"}
    with pytest.raises(UnavailableError, match="cannot be reached: ConnectError"):
        await describe(tools, nobody)
    found = await failure(tools, nobody, "do")
    assert found.kind is FailureKind.TRANSIENT


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("404 Not Found", BadInputError),
        ("401 Unauthorized", BadInputError),
        ("503 Service Unavailable", UnavailableError),
    ],
)
async def test_refusal_when_a_job_opens_is_one_clear_error(
    web: WebServer, tools: McpTools, status: str, kind: type[Exception]
) -> None:
    web.on_any = lambda _: (status, "no")
    with pytest.raises(kind, match=f"answers {status}"):
        await describe(tools, {"url": web.url})


async def test_secret_goes_into_the_header_and_into_no_error(
    web: WebServer, tools: McpTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEB_TOKEN", "canary-7f3a")
    headers = {"Authorization": "Bearer ${env:WEB_TOKEN}"}
    mcp = {"url": f"{web.url}?key=${{env:WEB_TOKEN}}", "headers": headers}
    assert await call(tools, mcp, "do") == "done"
    assert all("Authorization: Bearer canary-7f3a" in head for head in web.heads)
    assert all("?key=canary-7f3a " in head for head in web.heads)
    web.on_call = lambda _: ("401 Unauthorized", "who is that?")
    found = await failure(tools, mcp, "do")
    assert "canary" not in found.text
    assert "${env:WEB_TOKEN}" in found.text


async def test_header_or_address_that_http_cannot_carry_is_one_clear_error(
    tools: McpTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEB_TOKEN", "two\nlines")
    with pytest.raises(BadInputError, match="the header 'Authorization' has characters") as caught:
        await describe(
            tools, {"url": "http://a.example", "headers": {"Authorization": "${env:WEB_TOKEN}"}}
        )
    assert "lines" not in str(caught.value)
    for url in ("ftp://a.example/mcp", "http://[::1/mcp", "http:///mcp"):
        with pytest.raises(BadInputError, match="MCP server"):
            await describe(tools, {"url": url})
