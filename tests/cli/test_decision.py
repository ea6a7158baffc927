"""`muster show` tells what people decided; `muster run` tells once what it waits for from them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from contracts.approval import PendingApproval, Verdict
from muster.inbox import People
from muster.job_update import new_decision, new_pause
from tests.cli.stage import AGENT, CommandLine, Stage
from tests.cli.test_jobs import start
from tests.workflows.peer import Gate, calls, returns, says

ASKS = AGENT + "    approval: {by: [ann, bob, eve], people: 2}\n"
FIND = calls(("find", {"what": "coat"}))


async def waiting(stage: Stage, job_id: str, number: int = 1) -> list[PendingApproval]:
    """Wait until so many calls of a job wait for approval."""
    async with asyncio.timeout(30):
        while True:
            waits = await stage.jobs.waits(job_id)
            if waits and len(waits.pending) == number:
                return list(waits.pending)
            await asyncio.sleep(0.02)


def decisions(shown: Any) -> list[tuple[Any, ...]]:
    keys = ("kind", "by", "reason", "tool", "arguments", "approvals", "people")
    return [tuple(row[key] for key in keys) for row in shown["decisions"]]


async def test_show_tells_who_decided_what_when_and_why(stage: Stage, muster: CommandLine) -> None:
    text = ASKS + "max_parallel_tool_calls: 2\n"
    two = calls(("find", {"what": "coat"}), ("find", {"what": "hat"}))
    job_id = await start(stage, two, says("found"), text=text)
    stage.peer.script.tools["find"] = returns("in the hall")
    coat, hat = await waiting(stage, job_id, 2)
    given = [
        ("approve", coat.call_id, "ann", "it rains"),
        ("deny", hat.call_id, "bob", "no | hats\n\x1b[2Jhere"),
    ]
    for command, call_id, by, why in given:
        done = await muster.run(command, job_id, call_id, "--by", by, "--reason", why)
        assert done.status == 0, done
    done = await muster.run("show", job_id)
    shown = " ".join(done.out.split())
    assert "waits for approval: find(what='coat')" in shown
    assert "1 of 2 approved (ann); ann, bob, eve may decide" in shown
    assert f"muster approve {job_id} {coat.call_id}" in done.out.replace("\n", "")
    assert (await muster.run("show", job_id, "--json")).json["waits"]["pending"][0]["people"] == 2
    assert (await muster.run("approve", job_id, "--by", "eve")).status == 0
    await stage.jobs.wait(job_id)
    done = await muster.run("show", job_id, "--json")
    assert decisions(done.json) == [
        ("approved", "ann", "it rains", "find", "what='coat'", 1, 2),
        ("denied", "bob", "no | hats\n\x1b[2Jhere", "find", "what='hat'", None, None),
        ("approved", "eve", "", "find", "what='coat'", 2, 2),
    ]
    assert done.json["decisions"][0]["call_id"] == coat.call_id
    assert done.json["waits"] is None
    done = await muster.run("show", job_id)
    assert "approved (1 of 2)" in done.out
    assert "approved (2 of 2)" in done.out
    assert "waits for approval" not in done.out
    assert "\x1b" not in done.out


async def test_show_tells_of_expiry_and_pauses(stage: Stage, muster: CommandLine) -> None:
    text = AGENT + "    approval: {expires: 1s}\n"
    job_id = await start(stage, FIND, says("nobody was there"), text=text)
    people = People(stage.client)
    [call] = await waiting(stage, job_id)
    await people.pause(job_id, new_pause(by="ann", reason="lunch"))
    done = await muster.run("show", job_id)
    assert "paused by ann since" in done.out
    assert f"muster resume {job_id}" in done.out
    async with asyncio.timeout(30):
        while (waits := await stage.jobs.waits(job_id)) is None or waits.pending:
            await asyncio.sleep(0.02)
    await people.resume(job_id, new_pause(by="bob"))
    await stage.jobs.wait(job_id)
    found = await stage.jobs.report(job_id)
    assert [(row.kind, row.by, row.reason, row.call_id) for row in found.decisions] == [
        ("paused", "ann", "lunch", None),
        ("resumed", "bob", "", None),
        ("expired", None, "", call.call_id),
    ]
    assert found.decisions[2].tool == "find"
    done = await muster.run("show", job_id)
    assert "expired" in done.out
    assert "nobody" in done.out


async def test_decision_that_was_sent_twice_is_told_once(stage: Stage) -> None:
    job_id = await start(stage, FIND, says("found"), text=ASKS)
    stage.peer.script.tools["find"] = returns("in the hall")
    [call] = await waiting(stage, job_id)
    people = People(stage.client)
    given = [new_decision(call.call_id, Verdict.APPROVE, by=name) for name in ("ann", "bob")]
    await people.decide(job_id, given[0])
    handle = stage.client.get_workflow_handle(job_id)
    await handle.execute_update("decide", given[0], id="sent again")
    await people.decide(job_id, given[1])
    await stage.jobs.wait(job_id)
    assert [row.by for row in (await stage.jobs.report(job_id)).decisions] == ["ann", "bob"]


@pytest.mark.parametrize("options", [[], ["--json"]])
async def test_run_tells_once_how_to_approve_and_follows(
    stage: Stage, muster: CommandLine, options: list[str]
) -> None:
    text = AGENT + "    approval: always\n"
    muster.agent.write_text(text)
    stage.peer.script.replies = (FIND, says("found"))
    stage.peer.script.tools["find"] = returns("in the hall")
    program = await muster.start("run", str(muster.agent), "Find it.", *options)
    line = await program.error_line("muster approve ")
    assert line.startswith("waiting for approval of find(what='coat'): muster approve job-")
    job_id = line.split()[-1]
    done = await muster.run("approve", job_id, "--by", "ann")
    assert done.status == 0, done
    done = await program.end()
    assert done.status == 0, done
    assert "found" in done.out
    assert done.err.count("muster approve ") == 1


async def test_run_tells_of_a_call_that_waits_beside_one_that_runs(
    stage: Stage, muster: CommandLine
) -> None:
    gate = Gate()
    muster.agent.write_text(
        AGENT.replace("wardrobe:find", "wardrobe:find\n    name: look\n  - function: wardrobe:find")
        + "    approval: always\nmax_parallel_tool_calls: 2\n"
    )
    both = calls(("look", {"what": "coat"}), ("find", {"what": "hat"}))
    stage.peer.script.replies = (both, says("found"))
    stage.peer.script.tools |= {"look": gate.tool(returns("here")), "find": returns("there")}
    program = await muster.start("run", str(muster.agent), "Find them.")
    line = await program.error_line("muster approve ")
    assert not gate.opened.is_set()
    done = await muster.run("approve", line.split()[-1], "--by", "ann")
    assert done.status == 0, done
    gate.opened.set()
    assert (await program.end()).status == 0
