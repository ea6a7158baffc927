"""Groups of tools: their calls wait on a queue of their own, and hold up no others."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError

from contracts.agent import AgentSpec, OnFailure, PinnedTool, Sampling, ToolRef
from contracts.name import TOOLS_QUEUE
from muster.agent_file import parse_agent
from muster.stack.queue import ACTIVITY, waiting_tasks
from store.database import Database
from tests.acceptance.calling import asks, calling, says
from tests.activities.conftest import GOOD
from tests.activities.good_tool import Gate, gate_named
from tests.workflows.stage import progress

DEADLINE_S = 30.0
LIMIT, CALLS = 2, 6
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "tools.md"


@pytest.fixture
def gate() -> Iterator[Gate]:
    with gate_named("group") as found:
        yield found


def agent(tool: ToolRef) -> AgentSpec:
    return AgentSpec(
        name="caller",
        instructions="Call.",
        tools=(tool,),
        max_parallel_tool_calls=CALLS,
        sampling=Sampling(max_tokens=2_048),
    )


async def test_a_full_group_waits_on_its_own_queue_and_other_tools_go_on(
    temporal_client: Client, database: Database, gate: Gate
) -> None:
    """Its concurrency is what one worker runs at once; the rest waits on the server."""

    def model(number: int, prompt: str) -> dict[str, Any]:
        if number > 1:
            return says("Done.")
        if "shout" in prompt:
            return asks(("shout", {"text": "now"}))
        return asks(*[("wait", {"gate": "group"})] * CALLS)

    slow = agent(ToolRef(function=f"{GOOD}:wait", group="slow"))
    async with (
        calling(temporal_client, database, model, tool_groups=f"slow=x{LIMIT}") as stage,
        asyncio.timeout(DEADLINE_S),
    ):
        waiting = await stage.start(slow)
        queue = slow.tools[0].queue
        assert queue == "tools.slow"
        while await waiting_tasks(temporal_client, queue, ACTIVITY) < CALLS - LIMIT:
            pass  # each look is a call to the server
        assert len(await stage.ledger(waiting.id)) == LIMIT
        other = await stage.start(agent(ToolRef(function=f"{GOOD}:shout")))
        assert (await other.result()).answer == "Done."
        assert await waiting_tasks(temporal_client, TOOLS_QUEUE, ACTIVITY) == 0
        assert "calling 6 tools" in (await progress(waiting)).doing
        gate.go_on.set()
        assert (await waiting.result()).answer == "Done."
        assert len(await stage.ledger(waiting.id)) == CALLS


@pytest.mark.parametrize("on_failure", OnFailure)
async def test_a_group_that_nobody_serves_is_one_error_that_names_its_queue(
    temporal_client: Client, database: Database, on_failure: OnFailure
) -> None:
    told: list[str] = []

    def model(number: int, prompt: str) -> dict[str, Any]:
        told.append(prompt)
        return asks(("shout", {"text": "now"})) if number == 1 else says("Nobody there.")

    tool = ToolRef(
        function=f"{GOOD}:shout",
        group="nowhere",
        queue_timeout=timedelta(seconds=0.5),
        on_failure=on_failure,
    )
    said = "no worker took it from task queue 'tools.nowhere' within its queue_timeout of 0.5 s"
    async with calling(temporal_client, database, model) as stage, asyncio.timeout(DEADLINE_S):
        handle = await stage.start(agent(tool))
        if on_failure is OnFailure.TELL_MODEL:
            assert (await handle.result()).answer == "Nobody there."
            assert f"error: {said}" in told[1]
        else:
            with pytest.raises(WorkflowFailureError) as failed:
                await handle.result()
            assert str(failed.value.cause) == f"ToolFailedError: tool 'shout' failed: {said}"
        assert await stage.ledger(handle.id) == [], "no attempt was made"


async def test_the_group_of_the_guide_is_served_by_a_worker_that_is_told_of_it(
    temporal_client: Client,
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tool, agent and setting stand in the guide as they run here."""
    section = GUIDE.read_text().partition("\n## Groups: rate and concurrency\n")[2]
    code = dict(re.findall(r"^```(\w+)\n(.*?)^```$", section.partition("\n## ")[0], re.M | re.S))
    (tmp_path / "crm.py").write_text(code["python"])
    monkeypatch.syspath_prepend(tmp_path)
    [groups] = re.findall(r'MUSTER_TOOL_GROUPS="([^"]+)"', code["console"])
    clerk = parse_agent(code["yaml"], "clerk.yaml").spec
    read: list[str] = []

    def model(number: int, prompt: str) -> dict[str, Any]:
        read.append(prompt)
        if number == 1:
            return {"tool": "customer", "arguments": {"number": 7}}
        return says("Ada.")

    async with (
        calling(temporal_client, database, model, tool_groups=groups) as stage,
        asyncio.timeout(DEADLINE_S),
    ):
        handle = await stage.start(clerk)
        await handle.result()
        history = await handle.fetch_history()
    assert "Ada, Porto" in read[1]
    queues = [
        event.activity_task_scheduled_event_attributes.task_queue.name for event in history.events
    ]
    assert queues.count("tools.crm") == 1


def test_each_tool_of_a_server_is_of_the_servers_group() -> None:
    server = ToolRef.model_validate({"mcp": {"url": "http://crm.example/mcp"}, "group": "crm"})
    spec = AgentSpec(name="clerk", instructions="Look it up.", tools=(server,))
    [pinned] = spec.pinned([PinnedTool(name="find", server=0, remote="find")]).tools
    assert (pinned.tool_name, pinned.queue) == ("find", "tools.crm")


def test_a_group_is_for_tools_that_our_workers_run() -> None:
    activity = {
        "type": "reserve",
        "queue": "warehouse",
        "description": "Reserve.",
        "arguments": {"type": "object"},
    }
    with pytest.raises(ValueError, match="an activity has its `queue`"):
        ToolRef.model_validate({"activity": activity, "group": "crm"})
    assert ToolRef.model_validate({"activity": activity}).queue == "warehouse"
