"""Closed runs are archived and folded, however they closed, whoever sweeps and whatever dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest
import sqlalchemy as sa

from contracts.job import AgentJobInput, JobStatus
from contracts.llm_step import LLMStepInput, LLMStepResult, Usage
from contracts.name import AGENT_WORKFLOW, AGENTS_QUEUE
from muster.agent_file import parse_agent
from muster.archive import HistoryEncoder, decode_history
from muster.archiver import Archiver, Swept
from muster.job import Jobs
from muster.projection import fold
from muster.stack.namespace import prepare_namespace
from muster.stack.part import start_part
from muster.stack.port import free_port
from muster.stack.temporal import TemporalPart
from store.archive import ArchivedRun, HistoryArchive, lock_job, run_chain
from store.database import Database
from store.projection import Projections
from store.step_usage import StepUsage
from tests.cli.past import Past, step_result
from tests.cli.past_stage import PastStage
from tests.cli.rolling import start_rolling
from tests.cli.stage import AGENT, DEADLINE_S, MODEL
from tests.cli.test_report import TIMING, two_turns
from tests.workflows.peer import STEP_USAGE, Gate, Script, calls, raises, says

NEEDS_TOOL = calls(("find", {"what": "coat"}))


WAITING = sa.text(
    "SELECT count(*) AS waiting FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
KILL_OTHERS = sa.text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
)


async def test_completed_job_is_archived_whole(past: PastStage) -> None:
    job_id = await past.finished_job(NEEDS_TOOL, says("Wear a coat."))
    row = await past.archived(job_id)
    assert (row.agent, row.tenant, row.model) == ("weather", "default", MODEL)
    assert (row.status, row.stop_reason, row.answer) == ("completed", "answered", "Wear a coat.")
    assert (row.runs, row.turns, row.llm_steps, row.tool_calls) == (1, 2, 2, 1)
    assert (row.lower_bound, row.open_attempts, row.failure) == (False, 0, None)
    turns = await past.projections.turns(job_id)
    assert [(turn.turn, turn.tool_calls, turn.state) for turn in turns] == [
        (1, 1, "completed"),
        (2, 0, "completed"),
    ]
    assert turns[0].decode_s == pytest.approx(0.5)
    [run] = await HistoryArchive(past.database).runs(job_id)
    chunks = await HistoryArchive(past.database).chunks(job_id, run.run_id)
    handle = past.client.get_workflow_handle(job_id)
    assert decode_history(chunks) == list((await handle.fetch_history()).events)
    assert (run.status, run.events) == ("completed", len(decode_history(chunks)))


async def test_tokens_of_turns_job_and_ledger_are_equal(past: PastStage) -> None:
    tries = 0

    async def killed_once(step: LLMStepInput) -> LLMStepResult:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise RuntimeError("engine lost")
        return await NEEDS_TOOL(step)

    job_id = await past.finished_job(killed_once, NEEDS_TOOL, says("Wear a coat."))
    row = await past.archived(job_id)
    turns = await past.projections.turns(job_id)
    [ledger] = await past.database.fetch(
        sa.text("SELECT sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens)"
                " FROM step_ledger WHERE job_id = :job"),
        {"job": job_id},
    )  # fmt: skip
    of_job = (row.prompt_tokens, row.cached_tokens, row.completion_tokens)
    assert of_job == (300, 120, 30)
    assert of_job == tuple(int(total) for total in ledger)
    assert of_job == (
        sum(turn.prompt_tokens for turn in turns),
        sum(turn.cached_tokens for turn in turns),
        sum(turn.completion_tokens for turn in turns),
    )


async def test_failed_job_says_why(past: PastStage) -> None:
    text = AGENT + "    on_failure: fail_job\n"
    job_id = await past.finished_job(NEEDS_TOOL, text=text, tool=raises("locked"))
    row = await past.archived(job_id)
    assert row.status == "failed"
    assert row.failure is not None and "locked" in row.failure


async def test_cancelled_job_counts_what_its_step_returned(past: PastStage) -> None:
    gate = Gate()
    job_id = await past.start_job(gate.step(says("never")))
    await gate.reached.wait()
    await past.jobs.cancel(job_id)
    row = await past.archived(job_id)
    assert (row.status, row.prompt_tokens) == ("cancelled", STEP_USAGE.prompt_tokens)
    assert not row.lower_bound


async def test_terminated_job_counts_what_the_ledger_has_and_learns_later(
    past: PastStage,
) -> None:
    reached, opened = asyncio.Event(), asyncio.Event()

    async def heeds_nobody(step: LLMStepInput) -> LLMStepResult:
        reached.set()
        while not opened.is_set():
            with suppress(asyncio.CancelledError):
                await opened.wait()
        return await says("too late")(step)

    job_id = await past.start_job(NEEDS_TOOL, heeds_nobody)
    await reached.wait()
    step = (await past.jobs.report(job_id)).rows[-1].step
    assert step is not None
    used = Usage(prompt_tokens=50, completion_tokens=3)
    await past.storing.ledger.progress(step.step_id, 1, used)
    await past.client.get_workflow_handle(job_id).terminate(reason="enough")
    row = await past.archived(job_id)
    assert (row.status, row.failure, row.lower_bound) == ("terminated", "enough", True)
    assert (row.prompt_tokens, row.completion_tokens, row.open_attempts) == (150, 13, 1)
    opened.set()
    async with asyncio.timeout(DEADLINE_S):
        while row.open_attempts:
            row = await past.archived(job_id)
    assert (row.prompt_tokens, row.completion_tokens) == (200, 20)
    usage = (await past.jobs.report(job_id)).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (200, 20)
    assert usage.lower_bound


async def test_timed_out_job_is_archived(past: PastStage) -> None:
    gate = Gate()
    past.peer.script = Script((gate.step(says("never")),))
    job_id = f"job-{uuid4()}"
    job = AgentJobInput(agent=parse_agent(AGENT, "agent.yaml").spec, input="Berlin", model=MODEL)
    await past.client.start_workflow(
        AGENT_WORKFLOW, job, id=job_id, task_queue=AGENTS_QUEUE,
        execution_timeout=timedelta(seconds=1),
    )  # fmt: skip
    row = await past.archived(job_id)
    assert row.status == "failed"
    assert row.failure is not None and "execution timeout" in row.failure
    [run] = await HistoryArchive(past.database).runs(job_id)
    assert run.status == "timed_out"


async def test_job_that_continues_as_new_runs_until_its_last_run_closes(
    past: PastStage, rolling: str
) -> None:
    gate = Gate()
    past.peer.script = Script((says("one"), says("two"), gate.step(says("three"))))
    job_id = (await start_rolling(past.client, rolling, 3)).id
    assert await past.projections.job(job_id) is None
    await gate.reached.wait()
    row = await past.archived(job_id, runs=2)
    assert (row.status, row.runs, row.turns, row.closed_at) == ("running", 2, 2, None)
    gate.opened.set()
    row = await past.archived(job_id, runs=3)
    assert (row.status, row.answer, row.turns) == ("completed", "three", 3)
    assert row.prompt_tokens == 3 * STEP_USAGE.prompt_tokens
    runs = await HistoryArchive(past.database).runs(job_id)
    assert [run.status for run in runs] == ["continued_as_new", "continued_as_new", "completed"]
    assert runs[2].previous_run_id == runs[1].run_id
    assert [turn.step_id for turn in await past.projections.turns(job_id)] == [
        f"{job_id}/b/{number}" for number in (1, 2, 3)
    ]


async def test_running_job_has_no_row(past: PastStage) -> None:
    gate = Gate()
    running = await past.start_job(gate.step(says("never")))
    await gate.reached.wait()
    await past.archived(await past.finished_job(says("done")))
    assert await past.projections.job(running) is None


@asynccontextmanager
async def held(past: PastStage, job_id: str) -> AsyncIterator[asyncio.Task[Swept | None]]:
    """Sweep, held up at a job until the block ends; yields the sweep, which stands there."""
    await past.wait_for(job_id, JobStatus.COMPLETED)
    async with past.database.engine.begin() as connection:
        await lock_job(connection, job_id)
        sweep = asyncio.create_task(past.archiver.sweep())
        async with asyncio.timeout(DEADLINE_S):
            while not (await past.database.fetch(WAITING))[0].waiting:
                assert not sweep.done(), sweep.result()
        yield sweep
    sweep.cancel()
    await asyncio.wait({sweep})


async def test_two_archivers_at_once_archive_each_run_once(
    past: PastStage, database_url: str
) -> None:
    job_ids = [await past.finished_job(NEEDS_TOOL, says("a coat")) for _ in range(4)]
    for job_id in job_ids:
        await past.wait_for(job_id, JobStatus.COMPLETED)
    other_database = Database(database_url)
    try:
        other = Archiver(past.client, other_database)
        await asyncio.gather(past.archiver.collect(), other.collect())
    finally:
        await other_database.close()
    for job_id in job_ids:
        assert len(await HistoryArchive(past.database).runs(job_id)) == 1
        assert len(await past.projections.turns(job_id)) == 2


async def test_sweep_leaves_it_to_the_one_who_sweeps_already(
    past: PastStage, database_url: str
) -> None:
    job_id = await past.finished_job(says("a coat"))
    other_database = Database(database_url)
    try:
        async with held(past, job_id):
            assert await Archiver(past.client, other_database).sweep() is None
        assert await Archiver(past.client, other_database).sweep() is not None
    finally:
        await other_database.close()


async def test_archiver_killed_between_two_jobs_goes_on_with_the_second(past: PastStage) -> None:
    second = await past.finished_job(says("a coat"))
    first = await past.finished_job(says("a hat"))  # the newest is taken first
    await past.wait_for(first, JobStatus.COMPLETED)
    async with held(past, second) as sweep:
        sweep.cancel()
        await asyncio.wait({sweep})
        assert await past.projections.job(first) is not None
        assert await past.projections.job(second) is None
        assert await HistoryArchive(past.database).runs(second) == []
    assert (await past.archived(second)).answer == "a coat"


async def test_lost_connections_are_waited_out(past: PastStage) -> None:
    await past.archived(await past.finished_job(says("a coat")))
    job_id = await past.finished_job(says("a hat"))
    await past.wait_for(job_id, JobStatus.COMPLETED)
    running = asyncio.create_task(past.archiver.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            while await past.projections.job(job_id) is None:
                await past.database.fetch(KILL_OTHERS)
    finally:
        running.cancel()
        await asyncio.wait({running})


@pytest.mark.slow
async def test_server_that_is_away_is_waited_out(
    tmp_path: Path, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "muster.archiver")
    part = TemporalPart(port=free_port(), ui_port=None, namespace="default", directory=tmp_path)
    log = tmp_path / "temporal.log"
    server = await start_part(part, log, DEADLINE_S)
    running: asyncio.Task[None] | None = None
    try:
        client = await part.connect()
        await prepare_namespace(client)
        job_id = await Jobs(client).start(parse_agent(AGENT, "a.yaml").spec, "x", model=MODEL)
        running = asyncio.create_task(Archiver(client, database).run())
        await server.kill()
        async with asyncio.timeout(DEADLINE_S * 2):
            while "archiving waits" not in caplog.text:
                await asyncio.sleep(0.1)
        server = await start_part(part, log, DEADLINE_S)
        await client.get_workflow_handle(job_id).terminate(reason="enough")
        async with asyncio.timeout(DEADLINE_S * 2):
            while await Projections(database).job(job_id) is None:
                await asyncio.sleep(0.1)
        assert "archiving again" in caplog.text
    finally:
        if running:
            running.cancel()
            await asyncio.wait({running})
        await server.stop()


def test_history_comes_back_from_chunks_of_any_size() -> None:
    events = two_turns().events
    for chunk_bytes in (1, 100, 1_000_000):
        encoder = HistoryEncoder(chunk_bytes)
        chunks = [chunk for event in events for chunk in encoder.add([event])]
        chunks += encoder.finish()
        assert decode_history(chunks) == events
        assert max(map(len, chunks)) <= chunk_bytes
        assert encoder.events == len(events)


def test_runs_from_which_a_job_was_reset_do_not_count() -> None:
    def run(name: str, previous: str | None, hour: int) -> ArchivedRun:
        at = datetime(2026, 1, 1, hour, tzinfo=UTC)
        return ArchivedRun("job-1", name, previous, at, at, "completed", 1, 1)

    runs = [run("reset", "a", 4), run("b", "a", 2), run("a", None, 1), run("c", "b", 3)]
    assert [run.run_id for run in run_chain(runs)] == ["a", "reset"]
    assert run_chain([]) == []


def test_fold_reads_no_clock_and_adds_the_ledger_where_history_has_no_result() -> None:
    past = Past()
    step = past.step(1.0)
    past.start(step, 1.5)
    past.complete(step, step_result(TIMING), 2.0)
    past.start(past.step(3.0), 3.0)
    past.terminate("enough", 4.0)
    ledger = {
        "job-01/0/1": StepUsage(Usage(prompt_tokens=1_000), 0),  # history knows better
        "job-01/0/2": StepUsage(Usage(prompt_tokens=7, completion_tokens=2), 1),
    }
    job, turns, calls = fold("job-01", [past.events], ledger)
    assert calls == []
    assert (job.prompt_tokens, job.completion_tokens, job.open_attempts) == (107, 12, 1)
    assert [(turn.prompt_tokens, turn.lower_bound) for turn in turns] == [(100, False), (7, True)]
    assert turns[1].unfinished_s == 1.0
    assert fold("job-01", [past.events], ledger) == (job, turns, calls)
