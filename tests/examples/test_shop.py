"""The shop as an HTTP service, and its agent: a whole job with a scripted model."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from temporalio.client import Client

from activities.kind.openapi import OpenApiTools
from contracts.agent import AgentSpec
from contracts.message import Role
from examples.shop.service import DEFAULT_PORT, HOST
from muster.agent_file import parse_agent
from muster.stack.port import free_port
from store.database import Database
from tests.acceptance.calling import calling, says
from tests.activities.kind.calling import ask, tools

__all__ = ["tools"]

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "examples/shop/agent.yaml"
KEY = "some words"
START_TIMEOUT_S = 30.0


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentSpec]:
    """Run the service and return the agent, on another port than the file's."""
    monkeypatch.setenv("SHOP_KEY", KEY)
    port = free_port()
    command = [sys.executable, "-m", "examples.shop.service", "--port", str(port)]
    with subprocess.Popen(command, cwd=ROOT) as service:
        try:
            _wait_until_up(service, port)
            text = AGENT.read_text().replace(f"{HOST}:{DEFAULT_PORT}", f"{HOST}:{port}")
            yield parse_agent(text, str(AGENT)).spec
        finally:
            service.terminate()


def _wait_until_up(service: subprocess.Popen[bytes], port: int) -> None:
    transport = httpx.HTTPTransport(retries=8)  # with a growing pause between them
    with httpx.Client(transport=transport, timeout=START_TIMEOUT_S) as client:
        client.get(f"http://{HOST}:{port}/openapi.yaml").raise_for_status()
    assert service.poll() is None


async def test_job_orders_once_with_the_key_that_only_the_tool_worker_reads(
    temporal_client: Client, database: Database, agent: AgentSpec
) -> None:
    read: list[str] = []

    def model(number: int, prompt: str) -> dict[str, Any]:
        read.append(prompt)
        if number == 1:
            return {"tool": "get_fruit", "arguments": {"fruit": "plums"}}
        if number == 2:
            return {"tool": "order_fruit", "arguments": {"fruit": "plums", "count": 5}}
        return says("Order 1 is 5 plums for 60 cents.")

    async with calling(temporal_client, database, model) as stage, asyncio.timeout(60):
        handle = await stage.start(agent)
        assert "Order 1 is 5 plums for 60 cents." in str((await handle.result()).answer)
        rows = await stage.ledger(handle.id)
    assert [(row.tool, row.outcome) for row in rows] == [
        ("get_fruit", "finished"),
        ("order_fruit", "finished"),
    ]
    assert '{"order":1,"count":5,"fruit":"plums","cents":60}' in read[2]
    assert KEY not in read[2]


async def test_examples_of_the_agent_are_what_the_service_says(
    tools: OpenApiTools, agent: AgentSpec
) -> None:
    ref = agent.tools[0]
    for number, (message, answer) in enumerate(pairwise(agent.examples)):
        if answer.role is Role.TOOL:
            called = json.loads(message.content)
            one = ref.model_copy(update={"remote": called["tool"], "tools": ()})
            said = await ask(tools, one, f"key-{number}", **called["arguments"])
            shown = json.loads(answer.content)
            if "in_stock" in shown:
                shown["in_stock"] = json.loads(said)["in_stock"]
            assert json.loads(said) == shown
            again = await ask(tools, one, f"key-{number}", **called["arguments"])
            assert again == said, "the same key is the same order"


def test_service_without_a_key_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOP_KEY", raising=False)
    ended = subprocess.run(
        [sys.executable, "-m", "examples.shop.service"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "SHOP_KEY is not set" in ended.stderr


async def test_wrong_key_is_named_in_one_attempt(
    tools: OpenApiTools, agent: AgentSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_KEY", "other words")
    one = agent.tools[0].model_copy(update={"remote": "get_fruit", "tools": ()})
    with pytest.raises(Exception, match="GET /fruits/plums answered 401 Unauthorized"):
        await ask(tools, one, fruit="plums")
