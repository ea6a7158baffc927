"""Where the time of a job went: its parts sum to it, from history as from the projections."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from google.protobuf.json_format import Parse
from hypothesis import given, settings
from hypothesis import strategies as st
from temporalio.api.common.v1 import Payload
from temporalio.api.history.v1 import History, HistoryEvent

from contracts.llm_step import Divergence, StepTiming
from contracts.name import SEARCH_WAITING_FOR
from contracts.tool import ToolOutcome
from muster.advice import Bound, advise
from muster.attainable import BLOCK_TOKENS
from muster.cli.report_view import job_times_view
from muster.report import build_report
from muster.time_report import job_times
from store.database import Database
from store.summary import Which
from tests.cli.past import EPOCH_NS, JOB_ID, Past, call_result, payloads, step_result
from tests.cli.past_job import (
    PRICE,
    check_same,
    check_times,
    follow_up,
    job_of,
    put_rows,
    sub_agent_job,
    sums_of,
    text_of,
    times_of,
    used,
    waits_for,
)
from tests.cli.test_report import TIMING, check_sums, report_at, two_turns
from tests.workflows.kind_of_job import DIRECTORY

RUNS = {
    first: tuple(sorted(name for name in names if re.sub(r"_\d+$", "", name) == first))
    for names in [{path.stem for path in DIRECTORY.glob("*.json")}]
    for first in sorted(name for name in names if not re.search(r"_\d+$", name))
}
"""The saved jobs, each with its runs."""

EVER = (datetime(2000, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC))


def test_wait_for_people_is_what_no_activity_of_the_job_overlaps() -> None:
    past = job_of(TIMING, 1.0)
    past.events.pop()
    waits_for(past, 10.0, "approval", "approval:anyone")
    call = past.call(11.0)
    past.start(call, 11.0)
    past.complete(call, call_result(2.0), 13.0)
    waits_for(past, 20.0)
    waits_for(past, 30.0, "resume")
    past.answer("done", 32.0)
    report = report_at(99.0, past)
    check_sums(report)
    assert report.people_s == pytest.approx(10.0 - 2.0 + 2.0)
    times = job_times(report, 0.0)
    assert times.account.split.people_s == report.people_s


def test_wait_for_people_goes_on_over_a_roll_over_and_to_now() -> None:
    first, second = Past(), Past(continued_from="first")
    waits_for(first, 1.0, "approval")
    for event in second.events:
        event.event_time.FromNanoseconds(EPOCH_NS + 5 * 10**9)
    report = report_at(9.0, first, second)
    check_sums(report)
    assert report.people_s == pytest.approx(8.0)
    assert advise(job_times(report, 0.0).account).bound is Bound.PEOPLE
    removed = Payload(metadata={"encoding": b"binary/null"})
    waits_for(second, 6.0)
    upserted = second.events[-1].upsert_workflow_search_attributes_event_attributes
    upserted.search_attributes.indexed_fields[SEARCH_WAITING_FOR].CopyFrom(removed)
    assert report_at(9.0, first, second).people_s == pytest.approx(5.0)


def test_attainable_is_what_the_session_had_in_whole_blocks_and_no_less_than_was_cached() -> None:
    past = Past()
    follow_up(past, 0.0, None, used(100, 48))
    follow_up(past, 2.0, f"{JOB_ID}/0/1", used(150, 96))
    follow_up(past, 4.0, f"{JOB_ID}/0/2", used(200, 32, completion=30, wasted=20))
    follow_up(past, 6.0, f"{JOB_ID}/0/1", used(150, 128))
    follow_up(past, 8.0, f"{JOB_ID}/0/3", used(128, 0))
    rows = [row.step for row in report_at(99.0, past).rows if row.step]
    expected = [48, 110 // BLOCK_TOKENS * BLOCK_TOKENS, 160, 128, 112]
    assert [row.attainable_tokens for row in rows] == expected
    tokens = times_of(past).account.tokens
    assert tokens.attainable == sum(expected)
    assert tokens.cached_share == pytest.approx((48 + 96 + 32 + 128) / 728)


def test_what_a_template_rewrote_is_not_attainable() -> None:
    past = Past()
    follow_up(past, 0.0, None, used(100, 0))
    follow_up(past, 2.0, f"{JOB_ID}/0/1", used(150, 0))
    [payload] = past.events[-1].activity_task_completed_event_attributes.result.payloads
    result = step_result(TIMING).model_copy(
        update={"usage": used(150, 0), "diverged": Divergence(position=40, base_length=110)}
    )
    payload.CopyFrom(payloads(result).payloads[0])
    rows = [row.step for row in report_at(99.0, past).rows if row.step]
    assert rows[1].attainable_tokens == 32


def test_sub_agents_are_apart_from_tools_and_their_tokens_are_their_own_jobs() -> None:
    report = report_at(99.0, sub_agent_job())
    check_sums(report)
    account = job_times(report, 0.0).account
    assert (account.split.sub_agents_s, account.split.tools_s) == pytest.approx((3.0, 1.0))
    assert report.usage.prompt_tokens == 1_100
    assert account.tokens.prompt == 100
    assert (account.tool_calls, account.llm_steps) == (1, 1)
    assert [(tool.tool, tool.is_sub_agent) for tool in account.tools] == [
        ("tailor", True),
        ("find", False),
    ]
    assert advise(account).bound is Bound.SUB_AGENTS


def test_tools_stand_in_the_order_in_which_they_were_waited_for() -> None:
    past = Past()
    for number, (tool, took_s) in enumerate((("find", 1.0), ("search", 5.0), ("find", 2.0))):
        call = past.call(10.0 * number, tool)
        past.start(call, 10.0 * number)
        outcome = ToolOutcome.ERROR if tool == "search" else ToolOutcome.OK
        past.complete(call, call_result(took_s / 2, outcome), 10.0 * number + took_s)
    search, find = times_of(past).account.tools
    assert (search.tool, search.calls, search.failed, search.waited_s) == ("search", 1, 1, 5.0)
    assert (find.calls, find.failed, find.inside_s, find.longest_s) == (2, 0, 1.5, 2.0)


def test_cost_is_shown_where_a_price_is_known() -> None:
    past = job_of(TIMING, 0.1)
    assert times_of(past).account.cost is None
    times = times_of(past, price=3_600.0)
    assert times.account.cost is not None
    assert times.account.cost.at_most == pytest.approx(2 * (TIMING.prefill_s + TIMING.decode_s))
    assert "at 3,600.00 a GPU hour" in text_of(job_times_view(times))


def saved_runs(names: tuple[str, ...]) -> list[list[HistoryEvent]]:
    """Return the runs of a saved job."""
    read = [Parse((DIRECTORY / f"{name}.json").read_text(), History()) for name in names]
    return [list(history.events) for history in read]


@pytest.mark.parametrize("name", RUNS)
def test_parts_of_every_saved_job_sum_to_its_wall_time(name: str) -> None:
    report = build_report(JOB_ID, saved_runs(RUNS[name]))
    check_sums(report)
    times = job_times(report, 1.0)
    check_times(times)
    assert times.account.wall_s > 0
    for row in report.rows:
        if row.step and row.step.time:
            assert row.step.time.total_s == pytest.approx(row.step.total_s, rel=0.01)


def histories() -> Iterator[tuple[str, list[list[HistoryEvent]]]]:
    """Yield the saved jobs and some that were written by hand."""
    for name, names in RUNS.items():
        yield name, saved_runs(names)
    for name, past in (("two turns", two_turns()), ("sub-agent", sub_agent_job())):
        yield name, [past.events]


async def test_report_of_history_is_that_of_the_projections_for_every_kind_of_job(
    database: Database,
) -> None:
    for number, (name, runs) in enumerate(histories()):
        job_id = f"job-{number}"
        await put_rows(database, job_id, runs)
        of_history = job_times(build_report(job_id, runs), PRICE)
        times = await sums_of(database, Which(*EVER, job_id=job_id))
        check_same(times.account, of_history.account)
        assert times.advice == of_history.advice, name
    account = (await sums_of(database, Which(*EVER))).account
    each = [job_times(build_report(JOB_ID, runs), PRICE).account for _, runs in histories()]
    assert account.jobs == len(each)
    assert account.wall_s == pytest.approx(sum(one.wall_s for one in each))
    assert account.tokens.prompt == sum(one.tokens.prompt for one in each)
    assert account.tool_calls == sum(one.tool_calls for one in each)


async def test_period_has_the_jobs_that_ended_in_it_of_the_agent_and_tenant(
    database: Database,
) -> None:
    job = await put_rows(database, JOB_ID, [two_turns().events])
    assert job.closed_at
    soon = timedelta(seconds=1)
    before, after = job.closed_at - soon, job.closed_at + soon
    for which, number in (
        (Which(job.closed_at, after), 1),
        (Which(before, job.closed_at), 0),
        (Which(after, after + soon), 0),
        (Which(before, after, agent="weather", tenant="default"), 1),
        (Which(before, after, agent="other"), 0),
        (Which(before, after, tenant="other"), 0),
    ):
        account = (await sums_of(database, which)).account
        assert (account.jobs, account.tool_calls, account.llm_steps) == (number, number, 2 * number)


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_parts_sum_whatever_a_job_did(data: st.DataObject) -> None:
    durations = st.floats(0, 1e3)
    past, at_s = Past(), 0.0
    for _ in range(data.draw(st.integers(0, 4))):
        at_s += data.draw(durations)
        timing = StepTiming(**{name: data.draw(durations) for name in StepTiming.model_fields})
        step = past.step(at_s)
        past.start(step, at_s + data.draw(durations))
        at_s += timing.total_s + data.draw(durations) + 1e3
        past.complete(step, step_result(timing), at_s)
        for _ in range(data.draw(st.integers(0, 2))):
            call = past.call(at_s)
            past.start(call, at_s)
            at_s += data.draw(durations)
            past.complete(call, call_result(0.0), at_s)
        if data.draw(st.booleans()):
            waits_for(past, at_s, "approval")
            at_s += data.draw(durations)
            waits_for(past, at_s)
    past.answer("done", at_s)
    report = report_at(0.0, past)
    check_sums(report)
    times = job_times(report, 0.0)
    check_times(times)
    assert times.account.split.total_s == pytest.approx(times.account.wall_s, rel=0.01, abs=1e-6)
