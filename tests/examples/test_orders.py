"""The agent of the guide to MCP servers: its file is what the guide shows, and it runs."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client

from activities.tool import ModelFaultError
from contracts.agent import AgentSpec
from muster.agent_file import parse_agent
from store.database import Database
from tests.acceptance.calling import Reply, calling, says
from tests.activities.kind.mcp_client import DEADLINE_S, call, opened, shop_on_the_web

ROOT = Path(__file__).parents[2]
SERVER = "examples.orders.server"


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> AgentSpec:
    """Return the agent as the guide writes it, where its command finds server and Python."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    guide = (ROOT / "docs/guides/tools.md").read_text()
    section = guide.partition("\n## MCP servers\n")[2].partition("\n## ")[0]
    text = re.findall(r"^```yaml\n(.*?)^```$", section, re.M | re.S)[0]
    assert text == (ROOT / "examples/orders/agent.yaml").read_text()
    return parse_agent(text, "tools.md").spec


async def test_agent_of_the_guide_answers_from_its_server(
    agent: AgentSpec, temporal_client: Client, database: Database
) -> None:
    def model(number: int, prompt: str) -> Reply:
        if number == 1:
            assert "orders_track(number: integer): Say where an order is." in prompt
            assert "cancel_order(number: integer)" in prompt
            return {"tool": "orders_track", "arguments": {"number": 9}}
        if number == 2:
            assert "no such order: 9" in prompt
            return {"tool": "orders_track", "arguments": {"number": 1003}}
        assert "Order 1003 is delivered." in prompt
        return says("It is delivered.")

    async with calling(temporal_client, database, model) as jobs:
        handle = await jobs.start(agent)
        async with asyncio.timeout(DEADLINE_S):
            assert (await handle.result()).answer == "It is delivered."


async def test_order_is_cancelled_once_for_each_call_over_either_transport(
    agent: AgentSpec,
) -> None:
    server = agent.tools[0].mcp
    assert server is not None
    program: dict[str, Any] = server.model_dump(mode="json", exclude_defaults=True)
    async with shop_on_the_web(module=SERVER) as web, opened() as tools:
        for mcp in (program, web):
            for _ in range(2):
                answer = await call(tools, mcp, "cancel", number=1002, key="first")
                assert answer == "Order 1002 is cancelled."
            with pytest.raises(ModelFaultError, match="order 1002 has left: it is cancelled"):
                await call(tools, mcp, "cancel", number=1002, key="second")
