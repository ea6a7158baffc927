"""The worker in JavaScript; skipped where Node.js does not find Temporal's SDK (NODE_PATH)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from temporalio.client import Client

from muster.agent_file import read_agent_file
from store.database import Database
from tests.acceptance.calling import calling, says

WORKER = Path(__file__).parents[2] / "examples" / "remote_worker_node"
DEADLINE_S = 60.0


@pytest.fixture
def node() -> str:
    """Return the program, if it finds the SDK."""
    program = shutil.which("node")
    if program is None:
        pytest.skip("there is no Node.js")
    asked = [program, "-e", 'require("@temporalio/worker")']
    if subprocess.run(asked, capture_output=True, check=False, timeout=60).returncode:
        pytest.skip("Node.js does not find @temporalio/worker; set NODE_PATH")
    return program


@pytest.fixture
def queue(node: str, temporal_address: str) -> Iterator[str]:
    """Run the worker; return the task queue that it polls."""
    name = f"prices-{uuid4().hex[:8]}"
    environment = {**os.environ, "TEMPORAL_ADDRESS": temporal_address, "PRICES_QUEUE": name}
    process = subprocess.Popen([node, "prices.js"], cwd=WORKER, env=environment)
    yield name
    process.terminate()
    assert process.wait(DEADLINE_S) == 0


async def test_an_agent_calls_an_activity_in_javascript(
    temporal_client: Client, database: Database, queue: str
) -> None:
    read: list[str] = []

    def model(number: int, prompt: str) -> dict[str, Any]:
        read.append(prompt)
        return {"tool": "price_of", "arguments": {"item": "pears"}} if number == 1 else says("So.")

    agent = read_agent_file(WORKER / "agent.yaml").spec
    [tool] = agent.tools
    assert tool.activity is not None
    there = tool.activity.model_copy(update={"queue": queue})
    agent = agent.model_copy(update={"tools": (tool.model_copy(update={"activity": there}),)})
    async with (
        calling(temporal_client, database, model) as stage,
        asyncio.timeout(DEADLINE_S),
    ):
        await (await stage.start(agent)).result()
    told = read[1].rpartition("tool\n")[2].split("\n")[0]
    assert json.loads(told) == {"item": "pears", "cents": 60}


def test_the_agent_of_the_example_is_whole() -> None:
    """Also where there is no Node.js."""
    [tool] = read_agent_file(WORKER / "agent.yaml").spec.tools
    assert tool.queue == "prices"
    assert f"async function {tool.tool_name}(" in (WORKER / "prices.js").read_text()
