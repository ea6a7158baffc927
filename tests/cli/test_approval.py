"""`muster approvals`, `approve`, `deny`, `pause`, `resume`: the inbox of calls that wait."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.cli.stage import AGENT, CommandLine, Stage
from tests.cli.test_jobs import start
from tests.workflows.peer import calls, returns, says

ASKS = AGENT + "    approval: {by: [ann, bob]}\n"


async def _listed(muster: CommandLine, job_id: str, *options: str) -> list[Any]:
    """Return the calls of a job that the inbox lists, once it lists some."""
    async with asyncio.timeout(30):
        while True:
            done = await muster.run("approvals", "--json", *options)
            assert done.status == 0, done
            found = [e["call"] for e in done.json["entries"] if e["job_id"] == job_id]
            if found:
                return found


async def test_inbox_lists_a_call_until_it_is_decided(stage: Stage, muster: CommandLine) -> None:
    job_id = await start(stage, calls(("find", {"what": "coat"})), says("found"), text=ASKS)
    stage.peer.script.tools["find"] = returns("in the hall")
    [call] = await _listed(muster, job_id, "--for", "ann")
    assert call["tool"] == "find"
    done = await muster.run("approvals")
    assert "find(" in done.out.replace("\n", "")
    others = (await muster.run("approvals", "--json", "--for", "eve")).json["entries"]
    assert job_id not in [each["job_id"] for each in others]
    assert "'eve' may not decide" in await muster.refused("approve", job_id, "--by", "eve")
    assert "no call named 'pay'" in await muster.refused("approve", job_id, "pay", "--by", "ann")
    assert "is not the name of a person" in await muster.refused("deny", job_id, "--by", "a b")
    done = await muster.run("approve", job_id, "find", "--by", "ann")
    assert done.status == 0, done
    assert "approved by ann" in done.out
    await stage.jobs.wait(job_id)
    assert (await stage.jobs.report(job_id)).answer == "found"
    assert "no call of job" in await muster.refused("approve", job_id, "--by", "bob")


async def test_denied_call_is_told_to_the_model(stage: Stage, muster: CommandLine) -> None:
    job_id = await start(stage, calls(("find", {"what": "coat"})), says("no"), text=ASKS)
    await _listed(muster, job_id)
    done = await muster.run("deny", job_id, "--by", "bob", "--reason", "not now", "--json")
    assert done.json["verdict"] == "deny"
    await stage.jobs.wait(job_id)
    read = stage.peer.script.steps[1].append[0].content
    assert read == "error: find was not called: bob denied it: not now"


async def test_paused_job_goes_on_when_it_is_resumed(stage: Stage, muster: CommandLine) -> None:
    job_id = await start(stage, calls(("find", {"what": "coat"})), says("found"), text=ASKS)
    stage.peer.script.tools["find"] = returns("in the hall")
    await _listed(muster, job_id)
    assert (await muster.run("pause", job_id, "--by", "ann", "--json")).json["is_paused"]
    assert "paused already, by ann" in await muster.refused("pause", job_id, "--by", "bob")
    assert (await muster.run("approve", job_id, "--by", "ann")).status == 0
    assert not stage.peer.script.tool_calls
    assert (await muster.run("resume", job_id, "--by", "ann")).status == 0
    await stage.jobs.wait(job_id)
