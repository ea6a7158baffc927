"""A report is computed from history alone; parts sum to totals whatever the clocks did."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from temporalio.api.enums.v1 import TimeoutType
from temporalio.api.failure.v1 import Failure
from temporalio.api.history.v1 import HistoryEvent

from contracts.job import JobStatus, StopReason
from contracts.llm_step import Divergence, Outcome, StepTiming, Usage
from contracts.tool import ToolOutcome
from muster.cli.view import PLAIN_WIDTH, job_view
from muster.report import JobReport, build_report
from tests.cli.past import EPOCH_NS, JOB_ID, Past, call_result, failed, step_result

TIMING = StepTiming(
    host_pre_s=0.01,
    ready_wait_s=0.02,
    engine_queue_s=0.03,
    prefill_s=0.1,
    decode_s=0.5,
    host_post_s=0.04,
)


def report_at(now_s: float, *runs: Past) -> JobReport:
    """Return the report of a job as it is `now_s` after its start."""
    now = datetime.fromtimestamp(EPOCH_NS / 1e9 + now_s, UTC)
    return build_report(JOB_ID, [run.events for run in runs], now=now)


def check_sums(report: JobReport) -> None:
    """Check what holds for every report."""
    parts = report.time.model_dump().values()
    beside = (report.unfinished_s, report.people_s, report.other_s)
    assert all(value >= 0 for value in (*parts, report.wall_s, *beside))
    for row in report.rows:
        if row.step and row.step.time:
            assert all(value >= 0 for value in row.step.time.model_dump().values())
            assert row.step.time.tool_s == 0
        if row.step:
            parts_s = row.step.time.total_s if row.step.time else 0.0
            assert row.step.total_s == pytest.approx(parts_s + row.step.unfinished_s)
            assert min(row.step.total_s, row.step.unfinished_s) >= 0
            ready_wait_s = row.step.time.ready_wait_s if row.step.time else 0.0
            assert 0 <= row.step.backlog_s <= ready_wait_s
            assert row.step.attainable_tokens >= row.step.usage.cached_tokens or not row.step.time
        assert 0 <= row.sub_agent_s <= row.tool_s + 1e-9
        for tool in row.tools:
            assert 0 <= tool.total_s <= row.tool_s + 1e-9
            assert tool.total_s >= (tool.duration_s or 0)
    steps_s = sum(row.step.time.total_s for row in report.rows if row.step and row.step.time)
    tools_s = sum(row.tool_s for row in report.rows)
    assert report.time.total_s == pytest.approx(steps_s + tools_s)
    assert report.time.tool_s == pytest.approx(tools_s)
    accounted_s = report.time.total_s + report.unfinished_s + report.people_s
    assert report.other_s == pytest.approx(max(0.0, report.wall_s - accounted_s))


def two_turns() -> Past:
    """Return the history of a job with one tool call and an answer."""
    past = Past()
    step = past.step(1.0)
    past.start(step, 1.2)
    past.complete(step, step_result(TIMING, cohort_size=4), 2.0)
    call = past.call(2.1, what="coat")
    past.start(call, 2.2)
    past.complete(call, call_result(0.7), 3.0)
    step = past.step(3.1)
    past.start(step, 3.1)
    past.complete(step, step_result(TIMING, cohort_size=1), 4.0)
    past.answer("a coat", 4.5)
    return past


def test_each_part_of_a_job_is_where_its_time_went() -> None:
    report = report_at(99.0, two_turns())
    check_sums(report)
    assert report.status is JobStatus.COMPLETED
    assert (report.answer, report.agent, report.model) == ("a coat", "weather", "tiny")
    assert (report.turns, report.llm_steps, report.tool_calls) == (2, 2, 1)
    assert report.usage == Usage(prompt_tokens=200, cached_tokens=80, completion_tokens=20)
    assert report.wall_s == pytest.approx(4.5)
    assert report.mean_cohort_size == 2.5
    time = report.time
    assert time.prefill_s == pytest.approx(0.2)
    assert time.decode_s == pytest.approx(1.0)
    assert time.ready_wait_s == pytest.approx(0.2 + 2 * 0.02)  # the backlog of the first step
    assert time.orchestration_s == pytest.approx((1.0 - 0.7 - 0.2) + (0.9 - 0.7))
    assert time.tool_s == pytest.approx(0.9)
    assert report.other_s == pytest.approx(4.5 - 1.0 - 0.9 - 0.9)


def test_summary_has_exactly_the_promised_keys() -> None:
    summary = report_at(9.0, two_turns()).summary()
    assert list(summary) == [
        "job_id", "status", "answer", "turns", "llm_steps", "tool_calls", "usage", "wall_s", "time",
    ]  # fmt: skip
    assert summary["usage"] == {
        "prompt_tokens": 200, "cached_tokens": 80, "completion_tokens": 20,
    }  # fmt: skip
    assert isinstance(summary["time"], dict)
    assert list(summary["time"]) == [
        "orchestration_s", "host_pre_s", "ready_wait_s", "engine_queue_s", "prefill_s", "decode_s",
        "host_post_s", "tool_s",
    ]  # fmt: skip


def test_every_prefix_of_a_history_has_a_report() -> None:
    whole = two_turns().events
    for length in range(1, len(whole) + 1):
        now = datetime.fromtimestamp(EPOCH_NS / 1e9 + 50, UTC)
        report = build_report(JOB_ID, [whole[:length]], now=now)
        check_sums(report)
        assert (report.status is JobStatus.RUNNING) == (length < len(whole))


def test_open_step_counts_as_unfinished_up_to_now() -> None:
    past = Past()
    past.step(1.0)
    report = report_at(11.0, past)
    check_sums(report)
    [row] = report.rows
    assert row.step is not None
    assert (row.step.state, row.step.time) == ("open", None)
    assert report.unfinished_s == pytest.approx(10.0)
    assert (report.llm_steps, report.turns) == (0, 1)
    assert report.usage.lower_bound


def test_parallel_tool_calls_are_counted_once() -> None:
    past = Past()
    step = past.step(0.0)
    past.start(step, 0.0)
    past.complete(step, step_result(StepTiming(), cohort_size=0), 1.0)
    calls = [past.call(1.0), past.call(1.0), past.call(1.0)]
    for number, call in enumerate(calls):
        past.start(call, 1.0)
        past.complete(call, call_result(2.0), 4.0 + number)
    report = report_at(9.0, past)
    check_sums(report)
    assert report.time.tool_s == pytest.approx(5.0)
    assert report.mean_cohort_size is None
    assert report.tool_calls == 3


def test_attempts_and_their_failures_are_visible() -> None:
    past = Past()
    step = past.step(0.0)
    past.start(step, 5.0, attempt=3, after=failed("engine lost", "EngineDeadError"))
    past.complete(step, step_result(TIMING), 6.0)
    call = past.call(6.0)
    past.start(call, 7.0, attempt=4)
    past.fail(call, failed("service\n is down", "ToolUnavailable"), 8.0)
    past.break_down(failed("tool 'find' failed", "ToolFailedError", hint="look at\nit"), 9.0)
    report = report_at(99.0, past)
    check_sums(report)
    [row] = report.rows
    assert row.step is not None
    assert (row.step.attempts, row.step.failure) == (3, "EngineDeadError: engine lost")
    [tool] = row.tools
    assert (tool.attempts, tool.state) == (4, "failed")
    assert tool.failure == "ToolUnavailable: service is down"
    assert report.status is JobStatus.FAILED
    assert report.failure == "ToolFailedError: tool 'find' failed"
    assert report.hint == "look at it"


def test_timeout_says_which_one_and_what_failed_last() -> None:
    late = Failure(message="activity timeout")
    late.timeout_failure_info.timeout_type = TimeoutType.TIMEOUT_TYPE_HEARTBEAT
    late.cause.CopyFrom(failed("refused", "ConnectError"))
    past = Past()
    call = past.call(1.0)
    past.start(call, 1.0)
    past.time_out(call, late, 31.0)
    report = report_at(40.0, past)
    check_sums(report)
    [row] = report.rows
    assert row.step is None
    assert row.tools[0].failure == (
        "timed out: its worker gave no sign of life; last failure: ConnectError: refused"
    )


def test_wrapped_failure_shows_what_it_wraps() -> None:
    wrapper = Failure(message="Activity task failed")
    wrapper.activity_failure_info.activity_id = "1"
    wrapper.cause.CopyFrom(failed("no such city", "ToolFailedError", hint="spell it right"))
    past = Past()
    past.break_down(wrapper, 1.0)
    report = report_at(2.0, past)
    assert (report.failure, report.hint) == ("ToolFailedError: no such city", "spell it right")


def test_stopped_job_names_its_limit() -> None:
    past = Past()
    past.answer(None, 2.0, stop=StopReason.MAX_TURNS)
    report = report_at(3.0, past)
    assert (report.status, report.answer) == (JobStatus.STOPPED, None)
    assert report.stop_reason is StopReason.MAX_TURNS


def test_cancelled_step_keeps_its_time_and_usage() -> None:
    past = Past()
    step = past.step(0.0)
    past.start(step, 0.1)
    past.complete(step, step_result(TIMING, outcome=Outcome.CANCELLED), 2.0)
    past.cancel(2.1)
    report = report_at(9.0, past)
    check_sums(report)
    [row] = report.rows
    assert row.step is not None
    assert row.step.state == "cancelled"
    assert report.status is JobStatus.CANCELLED
    assert report.usage.completion_tokens == 10
    assert report.time.decode_s == pytest.approx(0.5)
    assert report.time.orchestration_s == 0  # nobody told what the rest of its time went into
    assert report.unfinished_s == pytest.approx(1.9 - TIMING.total_s)


def test_terminated_job_shows_what_was_lost() -> None:
    past = Past()
    past.step(1.0)
    past.terminate("by the operator", 5.0)
    report = report_at(99.0, past)
    check_sums(report)
    [row] = report.rows
    assert row.step is not None
    assert row.step.state == "lost"
    assert report.unfinished_s == pytest.approx(4.0)
    assert (report.status, report.failure) == (JobStatus.TERMINATED, "by the operator")
    assert report.usage.lower_bound


def test_job_that_ran_out_of_time_has_failed() -> None:
    past = Past()
    past.time_out_job(3_600.0)
    report = report_at(4_000.0, past)
    assert report.status is JobStatus.FAILED
    assert report.failure == "the job ran longer than its execution timeout"


def test_tool_that_says_no_is_no_failure() -> None:
    past = Past()
    call = past.call(1.0)
    past.start(call, 1.0)
    past.complete(call, call_result(0.1, ToolOutcome.ERROR), 2.0)
    [row] = report_at(3.0, past).rows
    assert (row.tools[0].state, row.tools[0].outcome) == ("completed", ToolOutcome.ERROR)
    assert row.tools[0].failure is None


def test_runs_of_one_job_are_one_report() -> None:
    first = Past()
    step = first.step(1.0)
    first.start(step, 1.0)
    first.complete(step, step_result(TIMING), 2.0)
    second = two_turns()
    for event in second.events:
        event.event_time.FromNanoseconds(event.event_time.ToNanoseconds() + 10 * 10**9)
    report = report_at(99.0, first, second)
    check_sums(report)
    assert [row.turn for row in report.rows] == [1, 2, 3]
    assert report.wall_s == pytest.approx(14.5)
    assert report.usage.prompt_tokens == 300


def test_result_of_another_version_is_a_row_without_times() -> None:
    past = two_turns()
    for event in past.events:
        if event.HasField("activity_task_completed_event_attributes"):
            [payload] = event.activity_task_completed_event_attributes.result.payloads
            payload.data = b'{"shape": "unknown"}'
    report = report_at(99.0, past)
    check_sums(report)
    assert [row.step.time for row in report.rows if row.step] == [None, None]


def test_clock_that_jumps_back_makes_no_negative_times() -> None:
    past = Past()
    step = past.step(100.0)
    past.start(step, 50.0)
    past.complete(step, step_result(TIMING), 20.0)
    call = past.call(20.0)
    past.start(call, 10.0)
    past.complete(call, call_result(0.7), 5.0)
    past.answer("done", -30.0)
    report = report_at(-60.0, past)
    check_sums(report)
    assert report.wall_s == 0
    assert report.time.decode_s == pytest.approx(0.5)
    assert report.time.orchestration_s == 0
    assert report.time.tool_s == pytest.approx(0.7)


moments = st.floats(-1e5, 1e5)
durations = st.floats(0, 1e4)
timings = st.builds(
    StepTiming,
    host_pre_s=durations,
    ready_wait_s=durations,
    engine_queue_s=durations,
    prefill_s=durations,
    decode_s=durations,
    host_post_s=durations,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_parts_sum_to_totals_for_any_clock(data: st.DataObject) -> None:
    def moment() -> float:
        return data.draw(moments)

    past = Past()
    for _ in range(data.draw(st.integers(0, 4))):
        step = past.step(moment())
        if data.draw(st.booleans()):
            past.start(step, moment(), attempt=data.draw(st.integers(1, 5)))
        if data.draw(st.booleans()):
            past.complete(step, step_result(data.draw(timings)), moment())
        calls = [past.call(moment()) for _ in range(data.draw(st.integers(0, 3)))]
        for call in calls:
            past.start(call, moment())
            if data.draw(st.booleans()):
                past.complete(call, call_result(data.draw(durations)), moment())
            elif data.draw(st.booleans()):
                past.fail(call, failed("no"), moment())
    if data.draw(st.booleans()):
        past.terminate("over", moment())
    events: list[HistoryEvent] = past.events
    now = datetime.fromtimestamp(EPOCH_NS / 1e9 + moment(), UTC)
    check_sums(build_report(JOB_ID, [events[: data.draw(st.integers(1, len(events)))]], now=now))


@pytest.mark.parametrize("diverged", [None, Divergence(position=1_200, base_length=3_400)])
def test_a_prompt_that_left_its_session_is_shown_in_one_line(diverged: Divergence | None) -> None:
    past = Past()
    step = past.step(1.0)
    past.start(step, 1.0)
    past.complete(step, step_result(TIMING).model_copy(update={"diverged": diverged}), 2.0)
    console = Console(width=PLAIN_WIDTH)
    with console.capture() as captured:
        console.print(job_view(report_at(3.0, past), ""))
    told = captured.get().count("differs from its session at token 1,200 of 3,400")
    assert told == (1 if diverged else 0)
