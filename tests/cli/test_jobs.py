"""`muster jobs`, `show` and `cancel`."""

from __future__ import annotations

import pytest

from contracts.job import JobStatus
from contracts.message import BlobRef
from contracts.tool import CallToolInput, CallToolResult
from muster.agent_file import parse_agent
from muster.job_id import new_job_id
from tests.cli.stage import AGENT, MODEL, CommandLine, Stage
from tests.workflows.peer import (
    Gate,
    Reply,
    Script,
    Tool,
    answered,
    calls,
    raises,
    returns,
    says,
)

OTHER = AGENT.replace("weather", "tailor")


async def start(stage: Stage, *replies: Reply, text: str = AGENT, find: Tool | None = None) -> str:
    """Start a job and return its id."""
    stage.peer.script = Script(replies, tools={"find": find or returns("one coat")})
    return await stage.jobs.start(parse_agent(text, "agent.yaml").spec, "Berlin", model=MODEL)


async def test_jobs_are_listed_by_state_and_agent(stage: Stage, muster: CommandLine) -> None:
    done_id = await start(stage, says("a coat"))
    await stage.jobs.wait(done_id)
    stopped_id = await start(
        stage,
        calls(("find", {"what": "coat"})),
        text=OTHER + "limits: {max_turns: 1, last_answer_tokens: 0}\n",
    )
    await stage.jobs.wait(stopped_id)
    gate = Gate()
    running_id = await start(stage, gate.step(says("never")))
    for job_id, status in (
        (done_id, JobStatus.COMPLETED),
        (stopped_id, JobStatus.STOPPED),
        (running_id, JobStatus.RUNNING),
    ):
        await stage.wait_for(job_id, status)

    async def listed(*filters: str) -> dict[str, str]:
        done = await muster.run("jobs", "--json", *filters)
        assert done.status == 0, done
        return {job["job_id"]: job["status"] for job in done.json["jobs"]}

    everything = await listed("--limit", "100")
    assert everything[done_id] == "completed"
    assert everything[stopped_id] == "stopped"
    assert everything[running_id] == "running"
    assert running_id in await listed("--state", "running")
    assert set((await listed("--state", "completed")).values()) == {"completed"}
    assert set(await listed("--state", "stopped", "--agent", "tailor")) == {stopped_id}
    assert len(await listed("--limit", "1")) == 1
    table = await muster.run("jobs")
    assert all(job_id in table.out for job_id in (done_id, stopped_id, running_id))


async def test_no_job_is_no_error(muster: CommandLine) -> None:
    done = await muster.run("jobs", "--agent", "nobody")
    assert (done.status, done.out) == (0, "")
    assert "no job of agent nobody" in done.err
    assert (await muster.run("jobs", "--agent", "nobody", "--json")).json == {"jobs": []}


async def test_show_tells_each_turn(stage: Stage, muster: CommandLine) -> None:
    job_id = await start(stage, calls(("find", {"what": "coat"})), says("Wear a coat."))
    await stage.jobs.wait(job_id)
    done = await muster.run("show", job_id)
    assert done.status == 0, done
    for part in ('find(what="coat")', "one coat", "Wear a coat.", "completed", "orchestration"):
        assert part in done.out
    shown = (await muster.run("show", job_id, "--json")).json
    assert [row["turn"] for row in shown["rows"]] == [1, 2]
    assert shown["rows"][0]["tools"][0]["arguments"] == {"what": "coat"}
    assert shown["job_id"] == job_id


async def test_show_tells_a_large_result_by_its_beginning_and_size(
    stage: Stage, muster: CommandLine
) -> None:
    async def find(call: CallToolInput) -> CallToolResult:
        blob = BlobRef(digest="0" * 64, bytes=4_000_000)
        return answered(call, "The beginning…").model_copy(update={"blob": blob})

    job_id = await start(stage, calls(("find", {"what": "coat"})), says("Wear a coat."), find=find)
    await stage.jobs.wait(job_id)
    shown = (await muster.run("show", job_id)).out
    assert "[4,000,000 bytes, whole in the store] The beginning…" in shown
    row = (await muster.run("show", job_id, "--json")).json["rows"][0]["tools"][0]
    assert row["blob"] == {"digest": "0" * 64, "bytes": 4_000_000}


async def test_show_tells_a_running_job_and_its_open_step(
    stage: Stage, muster: CommandLine
) -> None:
    gate = Gate()
    job_id = await start(stage, gate.step(says("never")))
    await gate.reached.wait()
    done = await muster.run("show", job_id)
    assert done.status == 0, done
    assert "running" in done.out
    assert "open" in done.out


async def test_show_tells_a_failed_job(stage: Stage, muster: CommandLine) -> None:
    job_id = await start(
        stage, calls(("find", {"what": "coat"})), text=AGENT + "    on_failure: fail_job\n"
    )
    stage.peer.script.tools["find"] = raises("the wardrobe is locked")
    await stage.jobs.wait(job_id)
    done = await muster.run("show", job_id)
    assert done.status == 0, done
    assert "failed" in done.out
    assert "the wardrobe is locked" in done.out


async def test_cancelled_job_is_cancelled_once(stage: Stage, muster: CommandLine) -> None:
    gate = Gate()
    job_id = await start(stage, gate.step(says("never")))
    await gate.reached.wait()
    done = await muster.run("cancel", job_id, "--wait", "--json")
    assert done.status == 0, done
    assert done.json == {"job_id": job_id, "status": "cancelled"}
    assert gate.cancelled.is_set()
    assert (await muster.run("cancel", job_id)).status == 0


async def test_job_that_has_ended_cannot_be_cancelled(stage: Stage, muster: CommandLine) -> None:
    job_id = await start(stage, says("a coat"))
    await stage.jobs.wait(job_id)
    assert "has already ended: completed" in await muster.refused("cancel", job_id)


@pytest.mark.parametrize("command", ["show", "cancel"])
async def test_unknown_job_is_one_line_and_a_hint(muster: CommandLine, command: str) -> None:
    job_id = new_job_id()
    assert f"no job {job_id}" in await muster.refused(command, job_id)
    assert "'banana' is not a job id" in await muster.refused(command, "banana", "--json")


@pytest.mark.parametrize(
    "filters",
    [
        ("--limit", "0"),
        ("--limit", "99999999"),
        ("--agent", "x' OR 1=1"),
        ("--state", "compleated"),
        ("--state", ""),
    ],
)
async def test_bad_filter_is_one_line_and_a_hint(
    muster: CommandLine, filters: tuple[str, ...]
) -> None:
    await muster.refused("jobs", *filters)


async def test_stack_that_is_not_up_is_one_line_and_a_hint(muster: CommandLine) -> None:
    for arguments in (("jobs",), ("show", new_job_id()), ("cancel", new_job_id())):
        err = await muster.refused(*arguments, MUSTER_TEMPORAL_ADDRESS="127.0.0.1:1")
        assert "muster up" in err


async def test_namespace_that_does_not_exist_is_one_line_and_a_hint(muster: CommandLine) -> None:
    (muster.directory / "plain.yaml").write_text("name: plain\ninstructions: Answer.\n")
    for arguments in (("jobs",), ("show", new_job_id()), ("run", "plain.yaml", "x")):
        err = await muster.refused(*arguments, MUSTER_TEMPORAL_NAMESPACE="nowhere")
        assert "nowhere" in err
        assert "MUSTER_TEMPORAL_NAMESPACE" in err


async def test_message_reaches_a_running_job_once(stage: Stage, muster: CommandLine) -> None:
    gate = Gate()
    job_id = await start(stage, gate.step(says("a coat")), says("two coats"))
    await gate.reached.wait()
    for _ in range(2):
        sent = await muster.run("send", job_id, "Make it two.", "--id", "first")
        assert (sent.status, sent.out) == (0, f"job {job_id} has the message first\n")
    gate.opened.set()
    assert (await stage.jobs.result(job_id)).answer == "two coats"
    report = await stage.jobs.report(job_id)
    assert len(report.rows) == 2


async def test_message_that_no_job_can_read_is_one_clear_error(
    stage: Stage, muster: CommandLine
) -> None:
    job_id = await start(stage, says("a coat"))
    await stage.jobs.wait(job_id)
    for arguments, error in (
        ((job_id, "Too late."), f"error: job {job_id} has ended: completed"),
        ((new_job_id(), "Hello?"), "error: no job "),
        ((job_id, " "), "error: the message is empty"),
        ((job_id, "x", "--id", "y" * 65), "error: the message's id has 65 characters"),
    ):
        done = await muster.run("send", *arguments)
        assert done.status == 1
        assert done.err.startswith(error), done.err
        assert "hint: " in done.err
