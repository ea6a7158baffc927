"""Token streams: a reader has exactly the final text, whatever became of attempts before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict

import httpx
import pytest
import uvicorn
from prometheus_client import CollectorRegistry

from contracts.llm_step import OutputForm
from inference_service.engine.protocol import EngineCapacity
from inference_service.engine.simulated import SimulatedConfig
from inference_service.generation import StopCause
from inference_service.http import MAX_STREAMS, http_app
from inference_service.prompt import draft_text
from inference_service.stream import Begun, Ended, JobStream, StreamEvent, Written
from muster.token_stream import Draft, drafting
from store.database import Database
from tests.inference_service.harness import Harness, harness, step_input, until

CAPACITY = EngineCapacity(32, 131_072, 32, 32_768, 2_048)
TIMED = SimulatedConfig(time_scale=1.0, max_num_seqs=4)
JSON = OutputForm(json_schema={"type": "object"})
ANSWER = OutputForm(tools=("search",), may_answer=True)
LONG = "word " * 40


def written(events: list[StreamEvent]) -> str:
    """Return what a reader of the job has in the end."""
    draft, text = Draft(), ""
    for event in events:
        if isinstance(event, Ended):
            text = draft.texts.get(event.step_id, "")
            assert event.text in (None, text) or event.tools, (event, text)
        draft.take(type(event).__name__.lower(), asdict(event))
    return text


async def test_the_text_comes_in_pieces_that_make_the_message(database: Database) -> None:
    async with harness(database, config=TIMED, respond=lambda *_: LONG) as h:
        stream = JobStream(h.service, "job-a")
        generation, _ = await h.attach(step_input())
        events = list[StreamEvent]()
        while not generation.task.done():
            events += stream.look()
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        events += stream.look()
    assert isinstance(events[0], Begun)
    assert sum(isinstance(event, Written) for event in events) > 3
    assert isinstance(events[-1], Ended)
    assert written(events) == LONG


async def test_a_sample_that_was_thrown_away_leaves_nothing_with_the_reader(
    database: Database,
) -> None:
    answers = iter(['{"cut": "here', '{"whole": true}'])
    async with harness(database, config=TIMED, respond=lambda *_: next(answers)) as h:
        stream = JobStream(h.service, "job-a")
        generation, _ = await h.attach(step_input(output=JSON))
        events = list[StreamEvent]()
        while not generation.task.done():
            events += stream.look()
            await asyncio.sleep(0.002)
        await asyncio.sleep(0)
        events += stream.look()
    assert sum(isinstance(event, Begun) for event in events) == 2
    assert written(events) == '{"whole": true}'


async def test_a_reader_who_comes_late_has_it_all_and_one_who_left_costs_nothing(
    database: Database,
) -> None:
    async with harness(database, config=TIMED, respond=lambda *_: LONG) as h:
        generation, _ = await h.attach(step_input())
        await until(lambda: generation.usage.completion_tokens > 20)
        stream = JobStream(h.service, "job-a")
        begun, first = stream.look()
        assert isinstance(begun, Begun)
        assert isinstance(first, Written)
        assert LONG.startswith(first.text)
        assert len(first.text) > 10
        await generation.task
        await asyncio.sleep(0)
        assert written([begun, first, *stream.look()]) == LONG
        stream.close()
        assert not h.service.on_end


async def test_a_step_that_is_over_between_two_looks_is_told_whole_and_other_jobs_are_not(
    database: Database,
) -> None:
    async with harness(database, respond=lambda *_: "Quick.") as h:
        stream = JobStream(h.service, "job-a")
        await h.run(step_input())
        await h.run(step_input(job_id="job-b"))
        await asyncio.sleep(0)
        events = stream.look()
    assert {event.step_id for event in events} == {"job-a/branch/0"}
    assert written(events) == "Quick."


async def test_a_cancelled_step_ends_without_a_text(database: Database) -> None:
    async with harness(database, config=TIMED, respond=lambda *_: LONG) as h:
        stream = JobStream(h.service, "job-a")
        generation, attempt = await h.attach(step_input())
        await until(lambda: generation.usage.completion_tokens > 3)
        await h.stop(generation, attempt, StopCause.CANCELLED)
        await asyncio.sleep(0)
        last = stream.look()[-1]
    assert last == Ended("job-a/branch/0", None)


@pytest.mark.parametrize(
    ("text", "form", "shown"),
    [
        ("Half a senten", OutputForm(), "Half a senten"),
        ("caf\ufffd", OutputForm(), "caf"),
        ('{"answer":"It is co', ANSWER, "It is co"),
        ('{"answer":"a \\u26', ANSWER, "a "),
        ('{"answ', ANSWER, ""),
        ('{"tool":"search","arguments":{"q":"co', ANSWER, ""),
        ('{"answer":{"high":2', ANSWER, ""),
        ("", ANSWER, ""),
    ],
)
def test_what_can_be_read_of_a_text_that_is_not_whole(
    text: str, form: OutputForm, shown: str
) -> None:
    assert draft_text(text, form) == shown


def test_pieces_of_an_attempt_that_is_void_are_left_alone() -> None:
    draft = Draft()
    for event, data in (
        ("begun", {"step_id": "s", "attempt": "1"}),
        ("written", {"step_id": "s", "attempt": "1", "text": "The c"}),
        ("begun", {"step_id": "s", "attempt": "2"}),
        ("written", {"step_id": "s", "attempt": "1", "text": "oat"}),
        ("written", {"step_id": "s", "attempt": "2", "text": "The hat"}),
        ("unknown", {}),
    ):
        draft.take(event, data)
    assert draft.text == "The hat"


@asynccontextmanager
async def served(h: Harness) -> AsyncIterator[str]:
    """Serve the service's HTTP surface on a port; yields its address."""
    app = http_app(h.service, model="small", capacity=CAPACITY, metrics=CollectorRegistry())
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


async def test_a_program_reads_along_over_http_across_a_restart_of_the_service(
    database: Database,
) -> None:
    drafts = list[str]()
    async with harness(database, config=TIMED, respond=lambda *_: LONG) as h:
        async with served(h) as url, drafting(url, "job-a") as draft:
            await until(lambda: bool(h.service.on_end))
            generation, _ = await h.attach(step_input())
            while not generation.task.done():
                drafts.append(draft.text)
                await asyncio.sleep(0.02)
            await until(lambda: not draft.text)
        await until(lambda: not h.service.on_end)
    assert all(LONG.startswith(text) for text in drafts)
    assert len(set(drafts)) > 3, "it came in pieces"


async def test_a_service_that_is_away_costs_the_reader_nothing() -> None:
    async with drafting("http://127.0.0.1:9", "job-a") as draft:
        await asyncio.sleep(0)
        assert draft.text == ""


async def test_readers_are_bounded(database: Database) -> None:
    async with harness(database) as h, served(h) as url:
        streams = [JobStream(h.service, "job-a") for _ in range(MAX_STREAMS)]
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"{url}/jobs/job-a/stream")
        for stream in streams:
            stream.close()
    assert answer.status_code == 503
    assert "64 streams are open" in answer.text
