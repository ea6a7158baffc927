"""Nothing that a kept job can reach is ever collected; what nobody can reach, and is old, is."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import JsonValue

from contracts.error import BadInputError
from contracts.llm_step import LLMStepInput, Usage
from contracts.message import BlobRef, ContextRef, Message, Role, ToolCall, node_hash
from contracts.tool import CallToolResult, ToolOutcome
from store.context import ContextStore, NotStoredError
from store.database import Database
from store.garbage import Garbage, collect
from store.step_ledger import Claimed, StepLedger
from store.tool_ledger import ToolClaimed, ToolLedger
from tests.store.sample import TOKENIZER, step_result, token_run, user

GRACE = timedelta(hours=24)
TABLES = ("contexts", "blobs", "token_runs")
LEDGERS = ("step_ledger", "tool_ledger")
NOTHING = dict.fromkeys((*TABLES, *LEDGERS), Garbage(0, 0))


def opening(agent: int) -> list[Message]:
    """Agents share their first message, and some their second."""
    return [Message(role=Role.SYSTEM, content="Be terse."), user(f"example {agent % 2}")]


def toolset(agent: int) -> JsonValue:
    return [{"agent": agent}]


@dataclass
class Job:
    """A job as the tests drive it, and what it must be able to reach for ever."""

    job_id: str
    agent: int
    base: ContextRef | None = None
    toolset: str | None = None
    steps: int = 0
    heads: list[ContextRef] = field(default_factory=list)
    blobs: list[str] = field(default_factory=list)


class World:
    """Jobs on a real database."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.contexts = ContextStore(database)
        self.steps = StepLedger(database)
        self.calls = ToolLedger(database)

    async def open(self, job_id: str, agent: int = 0) -> Job:
        job = Job(job_id, agent)
        head, job.toolset = await self.contexts.open(job_id, opening(agent), toolset(agent))
        job.base = ContextRef(head=head)
        job.heads.append(job.base)
        assert job.toolset
        job.blobs.append(job.toolset)
        return job

    async def tool_result(self, job: Job, text: str) -> Message:
        """Call a tool with a large result; the job has not taken its next step yet."""
        call = ToolCall(id=f"{job.job_id}/c/{len(job.blobs)}", tool="read", arguments={})
        claimed = await self.calls.claim(job_id=job.job_id, call=call, claim_token=b"t")
        assert isinstance(claimed, ToolClaimed)
        blob = await self.contexts.put_text(text)
        result = CallToolResult(
            call_id=call.id, outcome=ToolOutcome.OK, content="…", blob=blob, duration_s=0.0
        )
        assert await self.calls.commit(claimed.attempt, result)
        job.blobs.append(blob.digest)
        return Message(role=Role.TOOL, content="…", tool="read", tool_call_id=call.id, blob=blob)

    async def step(self, job: Job, *append: Message, answer: str = "hi") -> None:
        job.steps += 1
        step = LLMStepInput(
            step_id=f"{job.job_id}/b/{job.steps}",
            job_id=job.job_id,
            model="tiny",
            base=job.base,
            append=append or (user("go on"),),
        )
        claimed = await self.steps.claim(step=step, digest="d", replica="r", task_token=b"t")
        assert isinstance(claimed, Claimed)
        result, messages = step_result(step, claimed.epoch, Usage(), answer)
        parent = job.base.head if job.base else None
        run = token_run(step, [job.steps])
        assert await self.steps.commit(result, parent=parent, append=messages, run=run)
        assert result.context is not None
        job.base = result.context
        job.heads.append(result.context)

    async def grow_old(self, age: timedelta = GRACE * 2) -> None:
        for table in TABLES:
            await self.database.execute(
                sa.text(f"UPDATE {table} SET created_at = created_at - CAST(:age AS interval)"),
                {"age": age},
            )
        for ledger in LEDGERS:
            await self.database.execute(
                sa.text(f"UPDATE {ledger} SET ended_at = ended_at - CAST(:age AS interval)"),
                {"age": age},
            )

    async def results(self) -> dict[str, set[str]]:
        """Return the job of each result that a ledger keeps, by ledger."""
        return {
            ledger: {
                row.job_id
                for row in await self.database.fetch(
                    sa.text(f"SELECT job_id FROM {ledger} WHERE result IS NOT NULL")
                )
            }
            for ledger in LEDGERS
        }

    async def paid(self) -> list[str]:
        """Return all that the ledgers say, but for results."""
        rows = [
            str(row)
            for ledger in LEDGERS
            for row in await self.database.fetch(
                sa.text(f"SELECT to_jsonb({ledger}) - 'result' AS row FROM {ledger}")
            )
        ]
        return sorted(rows)

    async def names(self) -> dict[str, set[str]]:
        keys = {"contexts": "hash", "blobs": "digest", "token_runs": "step_id"}
        return {
            table: {row.name for row in await self.database.fetch(
                sa.text(f"SELECT {key} AS name FROM {table}"))}
            for table, key in keys.items()
        }  # fmt: skip

    async def reach(self, jobs: Sequence[Job]) -> dict[str, set[str]]:
        """Read all that these jobs hold, as they would; return its names."""
        found: dict[str, set[str]] = {table: set() for table in TABLES}
        for job in jobs:
            for head in job.heads:
                messages = await self.contexts.load(head.head)
                found["blobs"] |= {message.blob.digest for message in messages if message.blob}
                found["contexts"] |= await self._ancestors("contexts", "hash", head.head)
                if head.token_run:
                    assert await self.contexts.load_token_run(head.token_run, TOKENIZER)
                    found["token_runs"] |= await self._ancestors(
                        "token_runs", "step_id", head.token_run
                    )
            found["blobs"] |= set(job.blobs)
        for digest in found["blobs"]:
            await self.contexts.get_blob(digest)
        return found

    async def _ancestors(self, table: str, key: str, name: str) -> set[str]:
        found: set[str] = set()
        at: str | None = name
        while at is not None:
            found.add(at)
            rows = await self.database.fetch(
                sa.text(f"SELECT parent FROM {table} WHERE {key} = :name"), {"name": at}
            )
            at = rows[0].parent
        return found


async def build(world: World, seed: int, prefix: str) -> list[Job]:
    """Make a few jobs that share openings, results and whole conversations, and fork."""
    chance = random.Random(seed)
    jobs: list[Job] = []
    for number in range(chance.randint(1, 6)):
        job = await world.open(f"{prefix}-{number}", chance.randrange(3))
        if jobs and chance.random() < 0.4:
            other = chance.choice(jobs)
            job.base = chance.choice(other.heads)  # a fork: another job's conversation goes on
        for _ in range(chance.randrange(4)):
            if chance.random() < 0.5:
                told = await world.tool_result(job, f"result {chance.randrange(4)}" * 10)
                if chance.random() < 0.8:
                    await world.step(job, told, answer=f"answer {chance.randrange(2)}")
            else:
                await world.step(job, answer=f"answer {chance.randrange(2)}")
        jobs.append(job)
    return jobs


async def check_collection(database: Database, seed: int, kept_bits: int) -> None:
    world = World(database)
    await database.execute(
        sa.text("TRUNCATE contexts, blobs, token_runs, job_content, step_ledger, tool_ledger"), {}
    )
    jobs = await build(world, seed, "old")
    await world.grow_old()
    young = await build(world, seed + 1, "young")
    dead = [job for place, job in enumerate(jobs) if not kept_bits >> place & 1]
    kept = [job for job in jobs if job not in dead]
    before, paid, results = await world.names(), await world.paid(), await world.results()
    reachable = await world.reach([*kept, *young])
    ids = [job.job_id for job in kept]
    expected = {table: before[table] - reachable[table] for table in TABLES}

    found = await collect(database, ids, grace=GRACE)
    assert {table: found[table].rows for table in TABLES} == {
        table: len(names) for table, names in expected.items()
    }
    assert await world.names() == before, "a dry run deletes nothing"

    assert await collect(database, ids, grace=GRACE, delete=True) == found
    left = {job.job_id for job in (*kept, *young)}
    assert await world.results() == {ledger: jobs & left for ledger, jobs in results.items()}
    assert await world.paid() == paid, "what was paid stays"
    after = await world.names()
    assert {table: before[table] - after[table] for table in TABLES} == expected
    assert await world.reach([*kept, *young]) == reachable

    assert await collect(database, ids, grace=GRACE, delete=True) == NOTHING


def test_what_is_collected_is_what_is_old_and_out_of_reach(database_url: str) -> None:
    with asyncio.Runner() as runner:
        database = Database(database_url)

        @example(seed=392, kept_bits=8)  # a fork keeps a result of the job that it left
        @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
        @given(seed=st.integers(0, 10_000), kept_bits=st.integers(0, 63))
        def check(seed: int, kept_bits: int) -> None:
            runner.run(check_collection(database, seed, kept_bits))

        try:
            check()
        finally:
            runner.run(database.close())


async def test_content_that_a_new_job_writes_again_is_not_collected(database: Database) -> None:
    world = World(database)
    old = await world.open("old")
    await world.step(old)
    await world.tool_result(old, "large")
    await world.grow_old()
    new = await world.open("new")
    await world.step(new)
    new.blobs.append((await world.contexts.put_text("large")).digest)

    found = await collect(database, [], grace=GRACE, delete=True)

    assert await world.reach([new])
    assert found["contexts"].rows == found["blobs"].rows == 0
    assert found["token_runs"].rows == 1, "token runs are a job's own"


async def test_content_used_again_after_the_marking_is_not_deleted(database: Database) -> None:
    """The collection stands between marking and deleting while a job opens on the same content."""
    world = World(database)
    await world.open("old")
    await world.grow_old()
    async with database.engine.connect() as opener:
        # An opening that has made its content young, and has not committed yet.
        await opener.execute(sa.text("UPDATE contexts SET created_at = now()"))
        await opener.execute(sa.text("UPDATE blobs SET created_at = now()"))
        collecting = asyncio.create_task(collect(database, [], grace=GRACE, delete=True))
        async with asyncio.timeout(10):
            while not await _waits_for_a_lock(database):
                pass  # each look is a call to the server
        await opener.commit()
        found = await collecting
    assert found == NOTHING
    assert await world.open("new")


async def _waits_for_a_lock(database: Database) -> bool:
    rows = await database.fetch(
        sa.text(
            "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            " AND query LIKE 'DELETE%' AND datname = current_database()"
        )
    )
    return bool(rows)


async def test_openings_collected_while_jobs_open_on_them_are_whole(database: Database) -> None:
    world = World(database)
    for round_ in range(5):
        await world.open(f"old-{round_}")
        await world.grow_old()
        opened = [asyncio.create_task(world.open(f"new-{round_}-{number}")) for number in range(8)]
        await asyncio.gather(
            *opened, *(collect(database, [], grace=GRACE, delete=True) for _ in range(3))
        )
        jobs = [job.result() for job in opened]
        assert await world.reach(jobs)


async def test_a_result_is_dropped_with_its_bytes_counted(database: Database) -> None:
    world = World(database)
    gone, kept = await world.open("gone"), await world.open("kept")
    for job in (gone, kept):
        await world.step(job)
        await world.tool_result(job, "large")
    await world.grow_old()
    [row] = await database.fetch(
        sa.text("SELECT octet_length(result) AS bytes FROM step_ledger WHERE job_id = 'gone'")
    )
    found = await collect(database, ["kept"], grace=GRACE, delete=True)
    assert found["step_ledger"] == Garbage(1, row.bytes)
    assert found["tool_ledger"].rows == 1
    assert await world.results() == {ledger: {"kept"} for ledger in LEDGERS}


async def test_a_missing_blob_is_told_with_a_hint(database: Database) -> None:
    with pytest.raises(NotStoredError, match="is not in the store") as caught:
        await ContextStore(database).get_blob("0" * 64)
    assert "muster gc" in caught.value.hint


async def test_a_grace_time_too_short_for_safety_is_refused(database: Database) -> None:
    with pytest.raises(BadInputError, match=r"1:00:00 is too short, the limit is 2:00:00"):
        await collect(database, [], grace=timedelta(hours=1))


def test_messages_without_a_blob_are_written_as_before() -> None:
    """Hashes recorded before messages could refer to blobs."""
    told = Message(role=Role.TOOL, content="found é", tool_call_id="c1", tool="find")
    recorded = "a897a6dfbf99feaa17b7303ece2d0f9b4d5c9c22706bf1c78565f2e11ea0531a"
    assert node_hash(None, told) == recorded
    assert "blob" not in told.model_dump_json()
    blob = BlobRef(digest="0" * 64, bytes=1)
    assert node_hash(None, told.model_copy(update={"blob": blob})) != recorded
