"""A report's page needs nothing else, escapes what others wrote, and shows all there is."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest

from contracts.llm_step import StepTiming
from muster.account import totals_of
from muster.advice import Bound
from muster.cli.report_view import job_times_view, period_times_view
from muster.report_page import job_page, period_page
from muster.time_report import engine_time, job_times, period_times
from store.summary import Summary, Which
from tests.cli.past import Past, step_result
from tests.cli.past_job import job_of, text_of, times_of
from tests.cli.test_report import TIMING, report_at, two_turns

SINCE = datetime(2027, 1, 1, tzinfo=UTC)
EVIL = "<script>alert(1)</script>\"'&\x1b[2J\x00"


class Page(HTMLParser):
    """Reads a page: every tag must be closed, nothing may be loaded."""

    VOID = ("meta", "rect")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Check one tag."""
        self.tags.append(tag)
        assert not {"src", "srcset", "onclick", "style"} & {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Check that the last tag is closed first."""
        assert self.open.pop() == tag


def check_page(text: str) -> Page:
    """Check what holds for every page, and return it."""
    page = Page(text)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not re.search(r"url\(|@import", text)
    assert all(char.isprintable() or char == "\n" for char in text)
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    return page


def test_page_of_a_job_needs_nothing_else_and_escapes_what_others_wrote() -> None:
    report = report_at(9.0, two_turns())
    [tool] = report.rows[0].tools
    row = report.rows[0].model_copy(update={"tools": (tool.model_copy(update={"tool": EVIL}),)})
    told = {"agent": EVIL, "tenant": EVIL, "model": EVIL, "rows": (row,)}
    report = report.model_copy(update=told)
    times = job_times(report, 2.5)
    page = check_page(job_page(times, "http://localhost:8233/?a=1&b=<2>"))
    assert "svg" in page.tags
    shown = text_of(job_times_view(times))
    assert "\x1b" not in shown
    assert "\x00" not in shown


def test_page_of_a_long_job_draws_its_first_turns_and_counts_the_rest() -> None:
    past = Past()
    for number in range(250):
        step = past.step(number)
        past.start(step, number)
        past.complete(step, step_result(StepTiming(decode_s=1.0)), number + 1.0)
    text = job_page(times_of(past), "")
    check_page(text)
    assert "and 50 more" in text
    assert len(text) < 300_000


ENGINE = {
    "wall_s": 10.0, "useful_prefill_s": 1.0, "useful_decode_s": 3.0, "pending_s": 0.0,
    "recompute_s": 1.0, "waste_s": 0.5, "gap_s": 0.5, "idle_ready_s": 0.0, "idle_s": 4.0,
    "opportunity": 0.2,
}  # fmt: skip


def test_report_of_a_period_sums_its_jobs_and_says_what_the_engine_did() -> None:
    one, other = job_of(TIMING, 9.0), job_of(TIMING, 0.1)
    totals = [totals_of(report_at(99.0, past)) for past in (one, other)]
    summary = Summary(dict(zip(("weather", EVIL), totals, strict=True)), {}, {"completed": 2})
    which = Which(SINCE, datetime(2027, 1, 2, tzinfo=UTC))
    times = period_times(summary, which, 0.0, engine_time({"gpu": ENGINE}))
    assert times.account.jobs == 2
    assert times.account.wall_s == pytest.approx(sum(each.wall_s for each in totals))
    assert [each.agent for each in times.agents] == ["weather", EVIL]
    assert times.agents[0].advice.bound is Bound.TOOLS
    shown = text_of(period_times_view(times))
    assert "2 jobs ended since" in shown
    assert "opportunity 20%" in shown
    assert "40% nothing to do" in shown
    check_page(period_page(times))


def test_period_without_jobs_or_engine_says_so() -> None:
    which = Which(SINCE, datetime(2027, 1, 2, tzinfo=UTC), agent="weather")
    times = period_times(Summary({}, {}, {}), which, 1.0, None)
    shown = text_of(period_times_view(times))
    assert "no job of agent weather has ended since" in shown
    assert "no inference service answers" in shown
    check_page(period_page(times))


@pytest.mark.parametrize("gpu", [None, {}, {"wall_s": "x"}, {**ENGINE, "wall_s": 0.0}, []])
def test_answer_of_another_version_is_no_ledger(gpu: object) -> None:
    assert engine_time({"gpu": gpu}) is None
