"""MCP servers that misbehave: each is one clear error that names the server, in bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from activities.error_map import FailureKind, ToolFailure
from activities.kind.mcp import McpTools
from contracts.error import BadInputError, LimitExceededError, MusterError, UnavailableError
from tests.activities.kind.mcp_client import call, describe, failure, opened, program


@pytest.fixture
async def tools() -> AsyncIterator[McpTools]:
    """Return the kind, closed at last."""
    async with opened() as found:
        yield found


@pytest.mark.parametrize(
    ("way", "kind", "said"),
    [
        ("list", BadInputError, "tool 'do', inputSchema, type: Input should be 'object'"),
        ("nonsense", BadInputError, "at ['properties']['a']['type']: 5 is not valid"),
        ("loop", BadInputError, "a $ref in it leads back to itself"),
        ("elsewhere", BadInputError, "a $ref in it leads nowhere: 'http://127.0.0.1:9/schema'"),
        ("large", LimitExceededError, "the limit is 100,000 bytes"),
        ("text", BadInputError, "answers what is no MCP: tool 'do', inputSchema"),
        ("many", LimitExceededError, "has 2,000 tools, the limit is 64 tools"),
        ("twice", BadInputError, "lists two tools named 'do'"),
        ("pages", BadInputError, "lists its tools on more than 100 pages"),
        ("floods", BadInputError, "has printed more than 1,000 lines that are no MCP"),
    ],
)
async def test_server_that_lies_about_its_tools_is_one_clear_error(
    tools: McpTools, way: str, kind: type[MusterError], said: str
) -> None:
    with pytest.raises(kind) as caught:
        await describe(tools, program("bad_server", way))
    assert said in caught.value.message
    assert "bad_server.py" in caught.value.message
    assert not caught.value.retryable


async def test_one_of_very_many_tools_can_be_chosen(tools: McpTools) -> None:
    found = await describe(tools, program("bad_server", "many"), tools=["do_1999"])
    assert "do_1999" in found


async def test_list_of_several_pages_is_read_to_its_end(tools: McpTools) -> None:
    assert list(await describe(tools, program("bad_server", "two pages"))) == ["first", "do"]


async def test_server_that_hangs_at_its_list_is_given_its_time_and_may_come_back(
    tools: McpTools,
) -> None:
    with pytest.raises(UnavailableError, match=r"list its tools within 0\.5 s") as caught:
        await describe(tools, program("bad_server", "hangs at list", list_timeout=0.5))
    assert "list_timeout" in caught.value.hint
    assert "status" not in caught.value.message


async def test_server_that_dies_at_its_start_has_its_last_words_told_without_secrets(
    tools: McpTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAD_TOKEN", "canary-7f3a")
    mcp = program("bad_server", "dies", env={"TOKEN": "${env:BAD_TOKEN}"})
    with pytest.raises(UnavailableError) as caught:
        await describe(tools, mcp)
    assert "ended with status 4; its last words: no licence for [secret]" in caught.value.message


async def test_program_that_is_not_there_is_one_clear_error(tools: McpTools) -> None:
    with pytest.raises(BadInputError, match="cannot be started: No such file") as caught:
        await describe(tools, {"command": ["no-such-program"]})
    assert "PATH" in caught.value.hint


@pytest.mark.parametrize("way", ["greets", "bytes"])
async def test_some_lines_that_are_no_mcp_do_no_harm(tools: McpTools, way: str) -> None:
    assert (await call(tools, program("bad_server", way), "do")).startswith("done")


@pytest.mark.parametrize(
    ("way", "kind", "said"),
    [
        ("no such tool", FailureKind.MODEL, "refuses: Unknown tool: do"),
        ("no such method", FailureKind.MODEL, "refuses: Method not found"),
        ("bug", FailureKind.PERMANENT, "failed: division by zero"),
        ("no mcp", FailureKind.PERMANENT, "answers what is no MCP"),
    ],
)
async def test_call_that_goes_wrong_says_whose_fault_it_is(
    tools: McpTools, way: str, kind: FailureKind, said: str
) -> None:
    mcp = program("bad_server", way)
    found = await failure(tools, mcp, "do")
    assert found.kind is kind
    assert said in found.text
    assert "bad_server.py" in found.text


async def test_line_without_an_end_ends_the_server(
    tools: McpTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.mcp.program.MAX_MESSAGE_BYTES", 3_000_000)
    found = await failure(tools, program("bad_server", "long line"), "do")
    assert found.kind is FailureKind.PERMANENT
    assert "prints a line of more than 3,000,000 bytes" in found.text


async def test_server_that_asks_for_a_sample_is_refused_and_goes_on(tools: McpTools) -> None:
    assert await call(tools, program("bad_server", "asks"), "do") == (
        "refused: Sampling not supported"
    )


async def test_server_that_asks_without_end_is_ended(
    tools: McpTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.mcp.session.MAX_ASKED", 100)
    found = await failure(tools, program("bad_server", "asks on"), "do")
    assert found.kind is FailureKind.PERMANENT
    assert "has asked for something 101 times, the limit is 100 times" in found.text


async def test_server_that_closes_its_input_fails_the_calls_that_wait(tools: McpTools) -> None:
    mcp = program("bad_server", "deaf")
    first = asyncio.create_task(failure(tools, mcp, "do"))
    done: set[asyncio.Task[ToolFailure]] = set()
    while not done:  # the server closes its input some time after it has read the first call
        second = asyncio.create_task(failure(tools, mcp, "do"))
        done, _ = await asyncio.wait({second}, timeout=0.2)
        second.cancel()
    assert (await first).kind is FailureKind.TRANSIENT


async def test_resources_are_named_and_structured_content_is_json(tools: McpTools) -> None:
    assert (await call(tools, program("bad_server", "odd parts"), "do")).splitlines() == [
        "[resource file:///a.csv, unknown type, 1,000 bytes]",
        "[resource file:///b.txt, text/plain, 4 bytes]",
        '{"rows":2}',
    ]


async def test_tool_that_changes_or_vanishes_is_told_to_the_model(tools: McpTools) -> None:
    for way, said in (("changes", "'why' is a required property"), ("vanishes", "any more")):
        mcp = program("bad_server", way)
        assert await call(tools, mcp, "do") == "done"
        found = await failure(tools, mcp, "do")
        assert found.kind is FailureKind.MODEL
        assert said in found.text
