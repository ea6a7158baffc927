"""The client of jobs: starts each once, bounded and labelled; watches over outages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from datetime import timedelta
from pathlib import Path

import pytest

from contracts.agent import AgentSpec
from contracts.error import BadInputError, LimitExceededError
from contracts.job import JobProgress, JobStatus, StopReason
from contracts.llm_step import LLMStepInput, LLMStepResult
from contracts.name import SEARCH_AGENT, SEARCH_STATE, SEARCH_TENANT
from muster.agent_file import parse_agent
from muster.job import JobEndedError, Jobs
from muster.job_id import check_job_id, new_job_id, ui_link
from muster.stack.namespace import prepare_namespace
from muster.stack.part import start_part
from muster.stack.port import free_port
from muster.stack.temporal import TemporalPart
from tests.cli.stage import AGENT, DEADLINE_S, MODEL, Stage
from tests.cli.test_report import check_sums
from tests.workflows.peer import Gate, Script, calls, raises, returns, says
from workflows.option import TIMEOUT_GRACE

SPEC = parse_agent(AGENT, "agent.yaml").spec


async def start(stage: Stage, spec: AgentSpec = SPEC, text: str = "Berlin") -> str:
    """Start a job."""
    return await stage.jobs.start(spec, text, model=MODEL)


async def until(progress: AsyncGenerator[JobProgress, None], part: str) -> JobProgress:
    """Watch progress until it says `part`."""
    async with asyncio.timeout(DEADLINE_S):
        async for now in progress:
            if part in now.doing:
                return now
    raise AssertionError(f"progress never said {part!r}")


def test_ids_sort_by_time_and_are_recognised() -> None:
    ids = [new_job_id() for _ in range(100)]
    assert len(set(ids)) == 100
    assert all(check_job_id(job_id) == job_id == job_id.lower() for job_id in ids)


@pytest.mark.parametrize("text", ["", "job-", "01m8", "job-ü", "job-a b", "job-a\n", "x" * 10_000])
def test_what_is_no_job_id_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadInputError, match="is not a job id: they look like job-0") as caught:
        check_job_id(text)
    assert len(caught.value.message) < 200


def test_link_leads_to_the_job_in_its_namespace() -> None:
    link = ui_link("http://127.0.0.1:8233/", "team a", "job-01")
    assert link == "http://127.0.0.1:8233/namespaces/team%20a/workflows/job-01"


async def test_job_is_labelled_and_bounded(stage: Stage) -> None:
    stage.peer.script = Script((says("a coat"),))
    job_id = await stage.jobs.start(
        SPEC, "Berlin " + "ü" * 5_000, model=MODEL, tenant="acme", priority=2
    )
    await stage.jobs.wait(job_id)
    described = await stage.client.get_workflow_handle(job_id).describe()
    labels = {pair.key.name: pair.value for pair in described.typed_search_attributes}
    ours = {SEARCH_AGENT: "weather", SEARCH_TENANT: "acme", SEARCH_STATE: "completed"}
    assert ours.items() <= labels.items()
    timeout = described.raw_description.execution_config.workflow_execution_timeout
    assert timeout.ToTimedelta() == SPEC.limits.max_wall_time + TIMEOUT_GRACE
    summary = await described.static_summary()
    assert summary is not None
    assert summary.startswith("weather: Berlin ü")
    assert described.raw_info.priority.priority_key == 2
    assert described.raw_info.priority.fairness_key == "acme"


async def test_job_id_is_used_once_even_after_the_job_has_ended(stage: Stage) -> None:
    stage.peer.script = Script((says("a coat"),))
    job_id = new_job_id()
    await stage.jobs.start(SPEC, "Berlin", model=MODEL, job_id=job_id)
    await stage.jobs.wait(job_id)
    with pytest.raises(BadInputError, match=f"{job_id} exists already"):
        await stage.jobs.start(SPEC, "Berlin", model=MODEL, job_id=job_id)


async def test_start_input_too_large_for_temporal_is_refused(stage: Stage) -> None:
    with pytest.raises(LimitExceededError, match=r"as JSON has .* the limit is 1,900,000 bytes"):
        await start(stage, text="\x01" * 900_000)


async def test_agents_own_model_wins(stage: Stage) -> None:
    stage.peer.script = Script((says("a coat"),))
    spec = SPEC.model_copy(update={"model": MODEL})
    job_id = await stage.jobs.start(spec, "Berlin", model="another")
    assert (await stage.jobs.result(job_id)).answer == "a coat"


async def test_result_is_the_answer_with_its_usage(stage: Stage) -> None:
    stage.peer.script = Script(
        (calls(("find", {"what": "coat"})), says("a coat")), tools={"find": returns("one coat")}
    )
    job_id = await start(stage)
    result = await stage.jobs.result(job_id)
    assert (result.answer, result.stop_reason) == ("a coat", StopReason.ANSWERED)
    report = await stage.jobs.report(job_id)
    check_sums(report)
    assert report.usage == result.usage
    assert (report.turns, report.llm_steps, report.tool_calls) == (2, 2, 1)
    assert report.rows[0].tools[0].content == "one coat"


async def test_result_of_a_failed_job_says_why(stage: Stage) -> None:
    spec = parse_agent(AGENT + "    on_failure: fail_job\n", "agent.yaml").spec
    stage.peer.script = Script(
        (calls(("find", {"what": "coat"})),), tools={"find": raises("locked", "find the key")}
    )
    job_id = await start(stage, spec)
    with pytest.raises(JobEndedError, match="locked") as caught:
        await stage.jobs.result(job_id)
    assert (caught.value.status, caught.value.hint) == (JobStatus.FAILED, "find the key")


async def test_attempts_of_an_open_step_are_seen_before_it_closes(stage: Stage) -> None:
    gate = Gate()
    tries = 0

    async def fails_once(step: LLMStepInput) -> LLMStepResult:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise RuntimeError("engine lost")
        return await gate.step(says("a coat"))(step)

    stage.peer.script = Script((fails_once,))
    job_id = await start(stage)
    progress = stage.jobs.progress(job_id, every=timedelta(milliseconds=20))
    await until(progress, "attempt 2 after RuntimeError: engine lost")
    await progress.aclose()
    [row] = (await stage.jobs.report(job_id)).rows
    assert row.step is not None
    assert (row.step.state, row.step.attempts) == ("open", 2)
    assert row.step.failure == "RuntimeError: engine lost"
    gate.opened.set()
    await stage.jobs.wait(job_id)
    report = await stage.jobs.report(job_id)
    check_sums(report)
    [row] = report.rows
    assert row.step is not None
    assert (row.step.attempts, row.step.failure) == (2, "RuntimeError: engine lost")


async def test_progress_ends_with_the_job(stage: Stage) -> None:
    gate = Gate()
    stage.peer.script = Script((gate.step(says("a coat")),))
    progress = stage.jobs.progress(await start(stage), every=timedelta(milliseconds=20))
    await until(progress, "LLM step 1")
    gate.opened.set()
    async with asyncio.timeout(DEADLINE_S):
        async for _ in progress:
            pass


@pytest.mark.slow
async def test_watching_survives_a_killed_server(tmp_path: Path) -> None:
    part = TemporalPart(port=free_port(), ui_port=None, namespace="default", directory=tmp_path)
    log = tmp_path / "temporal.log"
    server = await start_part(part, log, DEADLINE_S)
    try:
        client = await part.connect()
        await prepare_namespace(client)
        jobs = Jobs(client)
        job_id = await jobs.start(SPEC, "Berlin", model=MODEL)
        progress = jobs.progress(job_id, every=timedelta(milliseconds=50))
        await until(progress, "waiting for an agent worker")
        await server.kill()
        await until(progress, "waiting for Temporal to answer")
        server = await start_part(part, log, DEADLINE_S)
        await until(progress, "waiting for an agent worker")
        await jobs.cancel(job_id)
        await client.get_workflow_handle(job_id).terminate("the test is over")
        async with asyncio.timeout(DEADLINE_S):
            async for _ in progress:
                pass
        assert (await jobs.report(job_id)).status is JobStatus.TERMINATED
    finally:
        await server.stop()
