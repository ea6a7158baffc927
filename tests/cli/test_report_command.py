"""`muster report` as people run it, on jobs that real servers ran."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from contracts.approval import Decision, Verdict
from contracts.error import BadInputError
from contracts.job import JobStatus
from muster.cli.report import period
from muster.inbox import People
from muster.time_report import PeriodTimes, job_times
from store.summary import Which
from tests.cli.past_job import PRICE, check_same, sums_of
from tests.cli.past_stage import PastStage
from tests.cli.stage import AGENT, DEADLINE_S, CommandLine, Done
from tests.workflows.peer import calls, says

NEEDS_TOOL = calls(("find", {"what": "coat"}))
ASKS = AGENT + "    approval: always\n"
NOW = datetime(2027, 1, 31, 12, tzinfo=UTC)


async def of_projections(past: PastStage, job_id: str) -> PeriodTimes:
    """Return the report of the one job from its projections."""
    now = datetime.now(UTC)
    which = Which(now - timedelta(days=1), now + timedelta(days=1), job_id=job_id)
    return await sums_of(past.database, which)


async def approved_job(past: PastStage) -> str:
    """Run a job whose call waits for a person, and return its id."""
    job_id = await past.start_job(NEEDS_TOOL, says("a coat"), text=ASKS)
    people = People(past.client)
    async with asyncio.timeout(DEADLINE_S):
        while not (pending := (await people.waits(job_id)).pending):
            pass  # each look is a call to the worker
    decision = Decision(id="d1", call_id=pending[0].call_id, verdict=Verdict.APPROVE, by="ann")
    await people.decide(job_id, decision)
    await past.jobs.wait(job_id)
    return job_id


async def test_report_of_history_is_that_of_the_projections(past: PastStage) -> None:
    answered = await past.finished_job(NEEDS_TOOL, NEEDS_TOOL, says("a coat"))
    approved = await approved_job(past)
    for job_id in (answered, approved):
        await past.archived(job_id)
        report = await past.jobs.report(job_id)
        of_history = job_times(report, PRICE)
        times = await of_projections(past, job_id)
        check_same(of_history.account, times.account)
        assert times.advice == of_history.advice
        assert times.states == {JobStatus.COMPLETED.value: 1}
        [each] = times.agents
        check_same(each.account, of_history.account)
    assert (await past.jobs.report(answered)).people_s == 0
    assert (await past.jobs.report(approved)).people_s > 0


async def test_report_of_a_job_and_of_a_period_as_json_text_and_page(
    past: PastStage, muster: CommandLine, database_url: str, tmp_path: Path
) -> None:
    text = AGENT.replace("weather", "wardrobe")
    job_id = await past.finished_job(NEEDS_TOOL, says("a coat"), text=text)
    await past.archived(job_id)
    page = tmp_path / "report.html"
    one = await muster.run("report", job_id, "--json", "--html", str(page))
    assert one.status == 0, one
    assert (one.json["job_id"], one.json["status"]) == (job_id, "completed")
    assert one.json["account"]["cost"] is None
    assert job_id in page.read_text()

    async def many(*options: str) -> Done:
        done = await muster.run(
            "report", *options, MUSTER_DATABASE_URL=database_url, MUSTER_GPU_HOUR_PRICE="3600"
        )
        assert done.status == 0, done
        return done

    of_hour = ("--last", "1h", "--agent", "wardrobe")
    found = (await many(*of_hour, "--json")).json
    account = found["account"]
    assert account["jobs"] == 1
    assert account["cost"]["at_most"] == pytest.approx(account["engine_s"])
    assert account["split"] == pytest.approx(one.json["account"]["split"])
    assert found["engine"] is None
    shown = await many(*of_hour, "--html", str(page))
    assert "1 job of agent wardrobe ended since" in shown.out
    assert "GPU hour" in shown.out
    assert f"page written to {page}" in shown.out
    nobody = await many("--since", "2020-01-01", "--tenant", "nobody")
    assert "no job of tenant nobody has ended since" in nobody.out


async def test_report_that_cannot_be_made_is_one_line_and_a_hint(
    past: PastStage, muster: CommandLine, tmp_path: Path
) -> None:
    job_id = await past.finished_job(says("a coat"))
    assert "no job job-none" in await muster.refused("report", "job-none")
    assert "is not a job id" in await muster.refused("report", "coat")
    assert "no database is known" in await muster.refused("report", "--last", "1h")
    missing = str(tmp_path / "missing" / "report.html")
    told = await muster.refused("report", job_id, "--html", missing)
    assert f"'{missing}' cannot be written: No such file or directory" in told
    assert "cannot be written: Is a directory" in await muster.refused(
        "report", job_id, "--html", str(tmp_path)
    )


@pytest.mark.parametrize(
    ("last", "since", "told"),
    [
        (None, None, "name a job or one period"),
        ("1h", "2027-01-30", "exclude each other"),
        ("soon", None, "--last 'soon' is not a duration"),
        ("0s", None, "is not a duration"),
        ("-1h", None, "is not a duration"),
        ("400d", None, "up to 366 days"),
        ("1" * 5_000, None, "is not a duration"),
        (None, "yesterday", "is no moment"),
        (None, "2027-02-30", "is no moment"),
        (None, "2027-02-01T00:00+00:00", "lies ahead"),
        (None, "9999-12-31T23:59:59-14:00", "is no moment"),
        (None, "0001-01-01", "is no moment"),
        (None, "0001-01-01T00:00+00:00", "is no moment"),
    ],
)
def test_wrong_period_is_told_with_its_value(
    last: str | None, since: str | None, told: str
) -> None:
    with pytest.raises(BadInputError, match=told) as caught:
        period(last, since, NOW)
    assert caught.value.hint
    assert len(caught.value.message) < 200


def test_period_ends_now() -> None:
    assert period("1h30m", None, NOW) == (NOW - timedelta(minutes=90), NOW)
    start, end = period(None, "2027-01-31T08:00+01:00", NOW)
    assert (start, end) == (datetime(2027, 1, 31, 7, tzinfo=UTC), NOW)
