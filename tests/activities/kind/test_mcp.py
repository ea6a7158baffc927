"""Tools of a well-behaved MCP server: the same over stdio and over both forms of HTTP."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from activities.error_map import FailureKind
from activities.kind.mcp import McpTools
from activities.tool import ModelFaultError, WrongArgumentsError
from contracts.error import BadInputError, LimitExceededError
from tests.activities.kind.mcp_client import (
    KEY,
    call,
    describe,
    failure,
    opened,
    shop,
    shop_on_the_web,
    until,
)

TOOLS = ["customer", "price", "picture", "pay", "who", "wait", "stand_still", "crash", "child"]


@dataclass
class Shop:
    """The server as an agent file names it, and the kind that asks it."""

    tools: McpTools
    mcp: dict[str, Any]
    transport: str

    async def call(self, remote: str, **arguments: Any) -> str:
        """Call one tool."""
        return await call(self.tools, self.mcp, remote, **arguments)


@pytest_asyncio.fixture(scope="module", params=["stdio", "http", "http json"])
async def the_shop(request: pytest.FixtureRequest) -> AsyncIterator[Shop]:
    """Return the server over each transport."""
    async with AsyncExitStack() as stack:
        mcp = shop()
        if request.param != "stdio":
            mcp = await stack.enter_async_context(shop_on_the_web(*request.param.split()[1:]))
        yield Shop(await stack.enter_async_context(opened()), mcp, request.param)


async def test_server_tells_its_tools_with_their_schemas(the_shop: Shop) -> None:
    found = await describe(the_shop.tools, the_shop.mcp)
    assert list(found) == [*TOOLS, "large"]
    assert found["customer"]["properties"]["number"]["type"] == "integer"


async def test_one_tool_of_a_server_has_the_name_it_is_given(the_shop: Shop) -> None:
    found = await describe(the_shop.tools, the_shop.mcp, remote="price", name="ask_price")
    assert list(found) == ["price"]
    with pytest.raises(BadInputError, match="has no tool 'prize'") as caught:
        await describe(the_shop.tools, the_shop.mcp, remote="prize")
    assert "price" in caught.value.hint


async def test_answer_is_the_text(the_shop: Shop) -> None:
    assert await the_shop.call("customer", number=7) == "Ada"


async def test_tool_that_says_no_is_the_models_to_mend(the_shop: Shop) -> None:
    """Case J3."""
    said = await failure(the_shop.tools, the_shop.mcp, "customer", number=8)
    assert said.kind is FailureKind.MODEL
    assert "no such customer: 8" in said.text


async def test_structured_answer_is_told_once(the_shop: Shop) -> None:
    assert (await the_shop.call("price", item="hat")).count("250") == 1


async def test_picture_is_named_and_not_shown(the_shop: Shop) -> None:
    assert await the_shop.call("picture") == "[image, image/png, 100 bytes]"


async def test_server_gets_the_calls_key(the_shop: Shop) -> None:
    assert await the_shop.call("pay", cents=5) == f"paid 5 under {KEY}"


async def test_arguments_are_checked_before_the_server_is_asked(the_shop: Shop) -> None:
    with pytest.raises(WrongArgumentsError, match="number: 'seven' is not of type 'integer'"):
        await the_shop.call("customer", number="seven")


async def test_tool_that_is_gone_is_one_clear_answer(the_shop: Shop) -> None:
    with pytest.raises(ModelFaultError, match="has no tool 'refund' any more"):
        await the_shop.call("refund")


async def test_large_answer_comes_whole(the_shop: Shop) -> None:
    assert await the_shop.call("large", size=5_000_000) == "x" * 5_000_000


async def test_calls_in_parallel_get_their_own_answers(the_shop: Shop) -> None:
    asked = [the_shop.call("pay", cents=number, key=f"key-{number}") for number in range(40)]
    answers = await asyncio.gather(*asked)
    assert answers == [f"paid {number} under key-{number}" for number in range(40)]


async def test_cancelled_call_is_cancelled_in_the_server_and_the_session_goes_on(
    the_shop: Shop, tmp_path: Path
) -> None:
    started, cancelled = tmp_path / "started", tmp_path / "cancelled"
    before = await the_shop.call("who")
    waiting = asyncio.create_task(
        the_shop.call("wait", started=str(started), cancelled=str(cancelled))
    )
    await until(started.exists)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    if the_shop.transport != "http json":  # where the `mcp` package's server does not learn of it
        await until(cancelled.exists)
    assert await the_shop.call("who") == before


async def test_more_tools_than_an_agent_may_have_must_be_chosen(
    the_shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.kind.mcp.MAX_TOOLS", 9)
    with pytest.raises(LimitExceededError, match="has 10 tools, the limit is 9 tools") as caught:
        await describe(the_shop.tools, the_shop.mcp)
    assert "tools: [...]" in caught.value.hint
    assert "pay" in await describe(the_shop.tools, the_shop.mcp, tools=["pay"])


async def test_program_gets_little_of_the_workers_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MUSTER_DATABASE_URL", "postgresql://private")
    monkeypatch.setenv("SHOP_SECRET", "canary-7f3a")
    mcp = shop(env={"SHOP_TOKEN": "${env:SHOP_SECRET}"}, more=["--token", "${env:SHOP_SECRET}"])
    async with opened() as tools:
        said = await call(tools, mcp, "who")
    assert "SHOP_TENANT=None SHOP_TOKEN=canary-7f3a MUSTER_DATABASE_URL=None" in said
    assert "--token canary-7f3a" in said
    assert os.environ["SHOP_SECRET"] not in str(mcp)
