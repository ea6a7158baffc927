"""Whole jobs with the tools of MCP servers: pinned, apart by tenant, tried once if refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError

from contracts.agent import AgentSpec
from contracts.limit import MAX_TOOLS
from store.database import Database
from tests.acceptance.calling import Handle, Reply, asks, calling, says
from tests.activities.kind.mcp_client import DEADLINE_S, program, shop, web_server

CANARY = "canary-7f3a"


def _agent(mcp: dict[str, Any], **tool: Any) -> AgentSpec:
    return AgentSpec.model_validate(
        {
            "name": "clerk",
            "instructions": "Serve.",
            "tools": [{"mcp": mcp, **tool}],
            "max_parallel_tool_calls": 2,
        }
    )


async def _answer(handle: Handle) -> str | None:
    async with asyncio.timeout(DEADLINE_S):
        return (await handle.result()).answer


async def test_two_tenants_have_the_same_tools_and_servers_of_their_own(
    temporal_client: Client, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case J3: the tool says no in one attempt, and the model goes on."""
    monkeypatch.setenv("SHOP_SECRET", CANARY)
    agent = _agent(
        shop(env={"SHOP_TOKEN": "${env:SHOP_SECRET}"}),
        name="shop",
        tools=["customer", "who"],
        max_calls=2,
    )

    def model(number: int, prompt: str) -> Reply:
        if number == 1:
            return asks(("shop_customer", {"number": 8}))
        if number == 2:
            assert "error: Error executing tool customer: no such customer: 8" in prompt
            return asks(("shop_who", {}))
        return says("done")

    async with calling(temporal_client, database, model) as jobs:
        handles = [await jobs.start(agent, tenant) for tenant in ("red", "blue")]
        assert [await _answer(each) for each in handles] == ["done", "done"]
        told = []
        for handle in handles:
            rows = await jobs.ledger(handle.id)
            assert [(row.tool, row.outcome) for row in rows] == [
                ("shop_customer", "finished"),
                ("shop_who", "finished"),
            ]
            told.append(json.loads(rows[1].result)["content"])
            history = (await handle.fetch_history()).to_json()
            assert CANARY not in history
        assert all("SHOP_TOKEN=[secret]" in each for each in told)
        assert told[0].split()[0] != told[1].split()[0], "two tenants, two processes"


async def test_call_that_the_server_answers_404_is_one_attempt_and_told(
    temporal_client: Client, database: Database
) -> None:
    """Case J3."""

    def model(number: int, prompt: str) -> Reply:
        if number == 1:
            return asks(("do", {}))
        assert "answers 404 Not Found: gone" in prompt
        return says("told")

    async with web_server() as web, calling(temporal_client, database, model) as jobs:
        web.on_call = lambda _: ("404 Not Found", "gone")
        handle = await jobs.start(_agent({"url": web.url}))
        assert await _answer(handle) == "told"
        assert len(await jobs.ledger(handle.id)) == 1


async def test_unavailable_server_is_asked_as_often_as_the_policy_says(
    temporal_client: Client, database: Database
) -> None:
    def model(number: int, prompt: str) -> Reply:
        if number == 1:
            return asks(("do", {}))
        assert "answers 503 Service Unavailable: down (gave up after 3 attempts)" in prompt
        return says("told")

    async with web_server() as web, calling(temporal_client, database, model) as jobs:
        web.on_call = lambda _: ("503 Service Unavailable", "down")
        retry = {"max_attempts": 3, "initial_interval": 0.1}
        handle = await jobs.start(_agent({"url": web.url}, retry=retry))
        assert await _answer(handle) == "told"
        assert len(await jobs.ledger(handle.id)) == 3
        assert web.count("tools/call") == 3


async def test_tools_are_those_of_when_the_job_opened(
    temporal_client: Client, database: Database
) -> None:
    """A server that changes its tools meanwhile is heard by the model, and the job's stay."""

    def model(number: int, prompt: str) -> Reply:
        if number <= 2:
            return asks(("do", {}))
        assert "'why' is a required property" in prompt
        return says("done")

    async with calling(temporal_client, database, model) as jobs:
        handle = await jobs.start(_agent(program("bad_server", "changes")))
        assert await _answer(handle) == "done"
        histories = json.loads((await handle.fetch_history()).to_json())
        assert str(histories).count("open_job") == 1


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("many", f"has 2,000 tools, the limit is {MAX_TOOLS} tools"),
        ("loop", "a $ref in it leads back to itself"),
    ],
)
async def test_server_that_lies_fails_the_job_once_when_it_opens(
    temporal_client: Client, database: Database, way: str, said: str
) -> None:
    async with calling(temporal_client, database, lambda *_: says("never")) as jobs:
        handle = await jobs.start(_agent(program("bad_server", way)))
        with pytest.raises(WorkflowFailureError) as caught:
            await _answer(handle)
        cause: BaseException | None = caught.value
        told = []
        while cause is not None:
            told.append(str(cause))
            cause = cause.__cause__
        assert said in "\n".join(told)
