"""Rebuilt projections are those that were there, to the byte, whatever the server has dropped."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa

from store.archive import HistoryArchive
from tests.cli.past_stage import PastStage
from tests.cli.rolling import start_rolling
from tests.cli.stage import AGENT, CommandLine
from tests.workflows.peer import Gate, Script, calls, raises, says

NEEDS_TOOL = calls(("find", {"what": "coat"}))


async def all_kinds(past: PastStage, rolling: str) -> list[str]:
    """Run and archive jobs that end in every way; return their ids, one that rolled over last."""
    gate = Gate()
    lost = await past.start_job(NEEDS_TOOL, gate.step(says("never")))
    await gate.reached.wait()
    await past.client.get_workflow_handle(lost).terminate(reason="enough")
    jobs = [
        lost,
        await past.finished_job(NEEDS_TOOL, says("Wear a coat.")),
        await past.finished_job(
            NEEDS_TOOL, text=AGENT + "    on_failure: fail_job\n", tool=raises("lo\x00cked")
        ),
        await past.finished_job(
            NEEDS_TOOL, text=AGENT + "limits: {max_turns: 1, last_answer_tokens: 0}\n"
        ),
    ]
    past.peer.script = Script((says("one"), says("two")))
    rolled = await start_rolling(past.client, rolling, 2)
    await rolled.result()
    for job_id in jobs:
        await past.archived(job_id)
    await past.archived(rolled.id, runs=2)
    return [*jobs, rolled.id]


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_rebuilt_is_what_was_live_even_after_the_server_has_dropped_histories(
    past: PastStage, rolling: str, muster: CommandLine, database_url: str
) -> None:
    job_ids = await all_kinds(past, rolling)
    live = await past.projected()
    assert len(live.jobs) >= 5
    await asyncio.gather(*map(past.drop, job_ids))
    await past.database.transact(
        lambda connection: connection.execute(sa.text("UPDATE jobs SET turns = 0, answer = 'no'"))
    )
    await past.database.transact(
        lambda connection: connection.execute(sa.text("DELETE FROM turns"))
    )
    await past.database.transact(
        lambda connection: connection.execute(sa.text("DELETE FROM calls"))
    )
    assert await past.projected() != live
    done = await muster.run("rebuild", "--json", MUSTER_DATABASE_URL=database_url)
    assert done.status == 0, done
    assert (done.json["jobs"], done.json["turns"]) == (len(live.jobs), len(live.turns))
    assert (done.json["archived_runs"], done.json["dropped_jobs"]) == (0, 0)
    assert await past.projected() == live
    shown = await muster.run("rebuild", MUSTER_DATABASE_URL=database_url)
    assert f"jobs           {len(live.jobs):>10,}" in shown.out


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_rebuild_takes_what_the_server_alone_has_and_drops_what_nothing_proves(
    past: PastStage, muster: CommandLine, database_url: str
) -> None:
    kept = await past.finished_job(says("a coat"))
    gone = await past.finished_job(says("a hat"))
    await past.archived(kept)
    await past.archived(gone)
    await past.drop(gone)
    before = await past.projected()
    await past.database.transact(
        lambda connection: connection.execute(sa.text("DELETE FROM histories"))
    )
    assert await HistoryArchive(past.database).runs(kept) == []
    done = await muster.run("rebuild", "--json", MUSTER_DATABASE_URL=database_url)
    assert done.status == 0, done
    assert done.json["dropped_jobs"] >= 1
    assert await past.projections.job(gone) is None
    after = await past.projected()
    assert set(after.jobs) < set(before.jobs)
    assert await past.projections.job(kept) is not None


async def test_rebuild_without_a_database_is_one_line_and_a_hint(muster: CommandLine) -> None:
    assert "no database is known" in await muster.refused("rebuild")
