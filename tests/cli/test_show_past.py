"""What is shown of a job's past: from the archive, its conversation, the size of its history."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from contracts.job import JobMessage, JobStatus
from contracts.tool import CallToolInput, CallToolResult
from muster.transcript import conversation_tail
from store.archive import HistoryArchive
from store.context import ContextStore
from tests.cli.past import Past as PastRun
from tests.cli.past import step_result
from tests.cli.past_stage import PastStage
from tests.cli.rolling import start_rolling
from tests.cli.stage import AGENT, DEADLINE_S, CommandLine
from tests.cli.test_report import TIMING
from tests.workflows.peer import Gate, Script, answered, calls, returns, says

CLOSE = timedelta(milliseconds=1)
"""The server rounds times in its listings and not in histories."""

NEEDS_TOOL = calls(("find", {"what": "coat"}))
TWO_CALLS = calls(("find", {"what": "coat"}), ("find", {"what": "hat"}))


async def shown(muster: CommandLine, url: str, job_id: str, *options: str) -> Any:
    """Return what `muster show --json` prints."""
    done = await muster.run("show", job_id, "--json", *options, MUSTER_DATABASE_URL=url)
    assert done.status == 0, done
    return done.json


def said(transcript: Any) -> list[tuple[str, str]]:
    """Return role and content of each message."""
    entries = transcript["entries"]
    return [(entry["message"]["role"], entry["message"]["content"]) for entry in entries]


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_job_that_the_server_has_dropped_is_shown_as_it_was(
    past: PastStage, muster: CommandLine, database_url: str
) -> None:
    job_id = await past.finished_job(NEEDS_TOOL, says("Wear a coat."))
    await past.archived(job_id)
    before = [
        await shown(muster, database_url, job_id, *options)
        for options in ((), ("--transcript",), ("--history-size",))
    ]
    await past.drop(job_id)
    after = [
        await shown(muster, database_url, job_id, *options)
        for options in ((), ("--transcript",), ("--history-size",))
    ]
    assert after == before
    assert f"no job {job_id}" in await muster.refused("show", job_id)
    text = await muster.run("show", job_id, MUSTER_DATABASE_URL=database_url)
    assert "Wear a coat." in text.out


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_earlier_runs_that_the_server_has_dropped_come_from_the_archive(
    past: PastStage, rolling: str, muster: CommandLine, database_url: str
) -> None:
    gate = Gate()
    past.peer.script = Script((says("one"), says("two"), gate.step(says("three"))))
    job_id = (await start_rolling(past.client, rolling, 3)).id
    await gate.reached.wait()
    await past.archived(job_id, runs=2)
    runs = await HistoryArchive(past.database).runs(job_id)
    await asyncio.gather(*(past.drop(job_id, run.run_id) for run in runs))
    report = await shown(muster, database_url, job_id)
    assert (report["status"], len(report["rows"])) == ("running", 3)
    assert len((await muster.run("show", job_id, "--json")).json["rows"]) == 1
    transcript = await shown(muster, database_url, job_id, "--transcript")
    assert said(transcript) == [
        ("system", "Roll."),
        ("user", "question 1"),
        ("assistant", "one"),
        ("user", "question 2"),
        ("assistant", "two"),
        ("user", "question 3"),
    ]
    assert [entry["stored"] for entry in transcript["entries"]] == [True] * 5 + [False]
    size = await shown(muster, database_url, job_id, "--history-size")
    assert len(size["runs"]) == 3
    gate.opened.set()


async def test_transcript_of_a_running_job_ends_with_what_only_history_knows(
    past: PastStage, muster: CommandLine, database_url: str
) -> None:
    gate = Gate()

    async def hat_waits(call: CallToolInput) -> CallToolResult:
        if call.call.arguments["what"] == "hat":
            await gate.stand()
        return await returns(f"one {call.call.arguments['what']}")(call)

    text = AGENT + "max_parallel_tool_calls: 2\n"
    job_id = await past.start_job(TWO_CALLS, says("Wear both."), tool=hat_waits, text=text)
    await gate.reached.wait()
    while (await past.jobs.report(job_id)).rows[0].tools[0].content is None:
        pass  # each look is a call to the server
    transcript = await shown(muster, database_url, job_id, "--transcript")
    assert said(transcript) == [
        ("system", "Say what to wear."),
        ("user", "Berlin"),
        ("assistant", ""),
        ("tool", "one coat"),
    ]
    assert [call["arguments"] for call in transcript["unanswered"]] == [{"what": "hat"}]
    gate.opened.set()
    await past.jobs.wait(job_id)
    transcript = await shown(muster, database_url, job_id, "--transcript")
    assert said(transcript)[3:] == [
        ("tool", "one coat"),
        ("tool", "one hat"),
        ("assistant", "Wear both."),
    ]
    assert transcript["unanswered"] == []


async def test_transcript_is_shortened_unless_all_is_asked_for(
    past: PastStage, muster: CommandLine, database_url: str
) -> None:
    job_id = await past.finished_job(NEEDS_TOOL, says("Wear it."), tool=returns("wool " * 400))
    short = await muster.run("show", job_id, "--transcript", MUSTER_DATABASE_URL=database_url)
    whole = await muster.run(
        "show", job_id, "--transcript", "--full", MUSTER_DATABASE_URL=database_url
    )
    assert short.out.count("wool") < 100 < whole.out.count("wool") == 400
    assert "more characters; --full shows all" in short.out
    assert 'find(what="coat")' in short.out
    assert short.out.index("Say what to wear.") < short.out.index("Berlin")


async def test_text_that_the_store_keeps_apart_is_shown_whole_if_asked_for(
    past: PastStage, muster: CommandLine, database_url: str
) -> None:
    blob = await ContextStore(past.database).put_text("wool " * 4_000)

    async def find(call: CallToolInput) -> CallToolResult:
        return answered(call, "wool …").model_copy(update={"blob": blob})

    job_id = await past.finished_job(NEEDS_TOOL, says("Wear it."), tool=find)

    async def transcript(*options: str) -> str:
        done = await muster.run(
            "show", job_id, "--transcript", *options, MUSTER_DATABASE_URL=database_url
        )
        assert done.status == 0, done
        return done.out

    assert "[the beginning of 20,000 bytes; --full shows it whole]" in await transcript()
    assert (await transcript("--full")).count("wool") == 4_000
    entry = (await shown(muster, database_url, job_id, "--transcript"))["entries"][3]
    assert entry["message"]["content"] == "wool …"
    assert entry["message"]["blob"]["bytes"] == 20_000
    whole = await shown(muster, database_url, job_id, "--transcript", "--full")
    assert whole["entries"][3]["message"]["content"] == "wool " * 4_000
    await past.database.execute(sa.text("DELETE FROM blobs"), {})
    assert "20,000 bytes; the store no longer has it whole" in await transcript("--full")


async def test_messages_that_a_job_has_not_read_are_shown_as_unread(
    past: PastStage, muster: CommandLine, database_url: str
) -> None:
    gate = Gate()
    job_id = await past.start_job(gate.step(says("A coat.")), says("Two."))
    await gate.reached.wait()
    await past.jobs.send(job_id, JobMessage(id="more", text="Make it two."))
    transcript = await shown(muster, database_url, job_id, "--transcript")
    assert transcript["unread"] == [{"id": "more", "text": "Make it two."}]
    text = await muster.run("show", job_id, "--transcript", MUSTER_DATABASE_URL=database_url)
    assert "user  more  (unread)" in text.out and "Make it two." in text.out
    assert "not read yet: 1 message: more" in (await muster.run("show", job_id)).out
    gate.opened.set()
    await past.jobs.wait(job_id)
    transcript = await shown(muster, database_url, job_id, "--transcript")
    assert transcript["unread"] == []
    assert said(transcript)[3:] == [("user", "Make it two."), ("assistant", "Two.")]
    assert "not read" not in (await muster.run("show", job_id)).out


async def test_message_that_a_job_never_read_is_shown_when_it_has_ended(
    past: PastStage, muster: CommandLine
) -> None:
    gate, text = Gate(), AGENT + "limits: {max_turns: 1, last_answer_tokens: 0}\n"
    job_id = await past.start_job(gate.step(NEEDS_TOOL), text=text)
    await gate.reached.wait()
    await past.jobs.send(job_id, JobMessage(id="more", text="Make it two."))
    gate.opened.set()
    await past.jobs.wait(job_id)
    done = await muster.run("show", job_id)
    assert "the job ended before it read 1 message: more" in done.out


async def test_job_that_has_rolled_over_is_listed_with_the_start_of_its_first_run(
    past: PastStage, rolling: str, muster: CommandLine
) -> None:
    gate = Gate()
    past.peer.script = Script((says("one"), says("two"), gate.step(says("three"))))
    job_id = (await start_rolling(past.client, rolling, 3)).id
    await gate.reached.wait()
    await past.wait_for(job_id, JobStatus.RUNNING)
    report = await past.jobs.report(job_id)
    async with asyncio.timeout(DEADLINE_S):
        while abs((await past.jobs.describe(job_id)).started_at - report.started_at) > CLOSE:
            pass  # visibility may take its time
    [row] = (await muster.run("jobs", "--state", "running", "--json")).json["jobs"]
    assert (row["job_id"], row["status"]) == (job_id, "running")
    assert abs(datetime.fromisoformat(row["started_at"]) - report.started_at) <= CLOSE
    gate.opened.set()


async def test_history_size_names_what_takes_the_bytes(
    past: PastStage, muster: CommandLine, database_url: str
) -> None:
    job_id = await past.finished_job(NEEDS_TOOL, says("Wear it."), tool=returns("x" * 20_000))
    size = await shown(muster, database_url, job_id, "--history-size")
    assert sum(kind["bytes"] for kind in size["kinds"]) == size["bytes"] > 40_000
    assert sum(kind["count"] for kind in size["kinds"]) == size["events"]
    assert sum(kind["share"] for kind in size["kinds"]) == pytest.approx(1)
    assert {kind["what"] for kind in size["kinds"][:2]} == {
        "call_tool: completed",
        "llm_step: scheduled",
    }
    assert size["largest_payload"]["what"] in ("call_tool: completed", "llm_step: scheduled")
    assert size["largest_payload"]["bytes"] > 20_000
    text = await muster.run("show", job_id, "--history-size")
    assert "largest payload: " in text.out and "call_tool: completed" in text.out


async def test_what_cannot_be_shown_is_one_line_and_a_hint(
    past: PastStage, muster: CommandLine
) -> None:
    job_id = await past.finished_job(says("a coat"))
    await past.wait_for(job_id, JobStatus.COMPLETED)
    assert "no database is known" in await muster.refused("show", job_id, "--transcript")
    both = await muster.refused("show", job_id, "--transcript", "--history-size")
    assert "exclude each other" in both
    assert "--transcript alone" in await muster.refused("show", job_id, "--full")


async def test_database_that_is_away_hides_no_job_that_the_server_has(
    past: PastStage, muster: CommandLine
) -> None:
    job_id = await past.finished_job(says("a coat"))
    away = "postgresql://nobody@127.0.0.1:1/nothing"
    assert (await muster.run("show", job_id, MUSTER_DATABASE_URL=away)).status == 0
    refused = await muster.refused("show", job_id, "--transcript", MUSTER_DATABASE_URL=away)
    assert "does not answer" in refused


def test_pending_messages_of_a_step_that_never_finished_stand_once() -> None:
    past = PastRun()
    step = past.step(1.0)
    past.start(step, 1.0)
    past.complete(step, step_result(TIMING), 2.0)
    past.step(3.0)
    past.terminate("enough", 4.0)
    tail = conversation_tail([past.events])
    assert [message.content for message in tail.pending] == ["hi"]
    assert tail.head is None  # the step came without a base
