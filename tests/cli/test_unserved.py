"""`muster run` says at once that nobody serves a queue that an agent's tools need."""

from __future__ import annotations

from uuid import uuid4

import pytest
from temporalio.worker import Worker

from tests.cli.stage import CommandLine, Stage
from tests.workflows.peer import Script, says


@pytest.mark.parametrize("of_sub_agent", [False, True], ids=["agent", "sub-agent"])
async def test_run_warns_of_a_group_and_of_an_activity_that_no_worker_polls(
    stage: Stage, muster: CommandLine, of_sub_agent: bool
) -> None:
    group, queue = f"g-{uuid4().hex[:8]}", f"warehouse-{uuid4().hex[:8]}"
    tools = (
        f"    group: {group}\n    queue_timeout: 90\n"
        f"  - activity:\n      type: reserve\n      queue: {queue}\n      description: Reserve.\n"
        "      arguments: {type: object}\n"
    )
    muster.agent.write_text(muster.agent.read_text() + tools)
    called = "weather.yaml"
    if of_sub_agent:
        called = "boss.yaml"
        (muster.directory / called).write_text(
            "name: boss\ninstructions: Ask.\n"
            "agents:\n  - file: weather.yaml\n    description: Knows it.\n"
        )
    stage.peer.script = Script((says("Wear a coat."),))
    done = await muster.run("run", called, "Berlin", "--json")
    assert done.status == 0, done
    assert done.json["answer"] == "Wear a coat."
    assert done.err.splitlines() == [
        f"warning: no worker polls task queue 'tools.{group}': calls of 'find' wait there for "
        "90 s (queue_timeout), then fail",
        f"warning: no worker polls task queue '{queue}': calls of 'reserve' wait there for "
        "600 s (queue_timeout), then fail",
    ]
    served = [
        Worker(stage.client, task_queue=name, activities=[stage.peer.call_tool])
        for name in (f"tools.{group}", queue)
    ]
    async with served[0], served[1]:
        stage.peer.script = Script((says("Wear a coat."),))
        assert (await muster.run("run", called, "Berlin", "--json")).err == ""
