"""How jobs look in a terminal: tables, the answer, where time went. Pure: reports in, text out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from pydantic import JsonValue
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from contracts.job import JobStatus, StopReason
from contracts.llm_step import Usage
from contracts.tool import ToolOutcome
from muster.duration import show_duration
from muster.job_row import JobRow
from muster.report import JobReport
from muster.turn_row import StepRow, ToolRow

PLAIN_WIDTH = 160
"""Width of tables that go to a file or a pipe: wide enough to keep ids whole."""

PREVIEW_CHARS = 200
"""Of a message, an argument list or a tool result in a turn table."""

MAX_IDS = 5
"""Of the messages that a job has not read."""

_STYLES = {
    JobStatus.RUNNING: "cyan",
    JobStatus.COMPLETED: "green",
    JobStatus.STOPPED: "yellow",
    JobStatus.FAILED: "red",
    JobStatus.CANCELLED: "yellow",
    JobStatus.TERMINATED: "red",
}

_PARTS = (
    ("orchestration_s", "orchestration", "Temporal and the workers"),
    ("host_pre_s", "host_pre", "resolve, render, tokenise"),
    ("ready_wait_s", "ready_wait", "ready, waiting for the scheduler"),
    ("engine_queue_s", "engine_queue", "waiting inside the engine"),
    ("prefill_s", "prefill", "reading the prompt"),
    ("decode_s", "decode", "generating"),
    ("host_post_s", "host_post", "parse, validate, commit"),
    ("tool_s", "tools", "at least one tool call in flight"),
)

_STOPPED = {
    StopReason.MAX_TURNS: ("its limit on turns", "max_turns"),
    StopReason.MAX_TOKENS: ("its limit on tokens", "max_tokens"),
    StopReason.MAX_TOOL_CALLS: ("its limit on tool calls", "max_tool_calls"),
    StopReason.MAX_WALL_TIME: ("its limit on wall time", "max_wall_time"),
    StopReason.MAX_LLM_STEPS: ("its limit on LLM steps", "max_llm_steps"),
    StopReason.MAX_ENGINE_TIME: ("its limit on time in the engine", "max_engine_time"),
}


def console(*, stderr: bool = False) -> Console:
    """Return a console that fits its terminal, or `PLAIN_WIDTH` where there is none."""
    out = Console(stderr=stderr, highlight=False, soft_wrap=False)
    return out if out.is_terminal else Console(stderr=stderr, highlight=False, width=PLAIN_WIDTH)


def json_text(value: object) -> str:
    """Return what `--json` prints of a value."""
    return json.dumps(value, ensure_ascii=False, indent=2)


def printable(text: str) -> str:
    """Return text that cannot steer a terminal: control characters but newline and tab go."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for char in text.replace("\r\n", "\n")
    )


def verdict(report: JobReport) -> tuple[str, str]:
    """Return, for a job without a whole answer, one line that says how it ended, and a hint."""
    job_id, show = report.job_id, f"muster show {report.job_id}"
    match report.status:
        case JobStatus.RUNNING:
            return f"job {job_id} is still running", show
        case JobStatus.STOPPED:
            what, key = _STOPPED.get(
                report.stop_reason or StopReason.ANSWERED, ("a limit", "limits")
            )
            hint = f"raise limits.{key} in the agent file, or see what it did: {show}"
            given = "without an answer" if report.answer is None else "with a last answer"
            return f"job {job_id} stopped {given}: it reached {what}", hint
        case JobStatus.FAILED:
            return f"job {job_id} failed: {report.failure or 'no reason given'}", (
                f"{report.hint}; {show}" if report.hint else show
            )
        case JobStatus.CANCELLED:
            return f"job {job_id} was cancelled", f"what it did until then: {show}"
        case JobStatus.TERMINATED:
            why = f": {report.failure}" if report.failure else ""
            return (
                f"job {job_id} was terminated from outside{why}",
                f"what it did until then: {show}",
            )
        case JobStatus.COMPLETED:
            return f"job {job_id} completed without an answer", show


def time_table(*reports: JobReport) -> RenderableType:
    """Return where the time of jobs went; the rows sum to their wall times, added up."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("time in")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    table.add_column("", style="dim")
    rows = [
        (name, sum(getattr(report.time, key) for report in reports), what)
        for key, name, what in _PARTS
    ]
    if unfinished_s := sum(report.unfinished_s for report in reports):
        rows.append(("unfinished", unfinished_s, "LLM steps that did not finish"))
    if people_s := sum(report.people_s for report in reports):
        rows.append(("people", people_s, "approvals and pauses"))
    rows.append(("between", sum(report.other_s for report in reports), "workflow, opening the job"))
    wall_s = sum(report.wall_s for report in reports)
    whole_s = max(wall_s, sum(seconds for _, seconds, _ in rows))
    for name, seconds, what in rows:
        share = f"{100 * seconds / whole_s:.0f}%" if whole_s else ""
        table.add_row(name, f"{seconds:.3f}", share, what)
    table.add_section()
    cohort = reports[0].mean_cohort_size if len(reports) == 1 else None
    table.add_row(
        "wall" if len(reports) == 1 else f"wall of {len(reports)} jobs",
        f"{wall_s:.3f}",
        "",
        f"mean cohort size {cohort:.1f}" if cohort is not None else "",
    )
    return table


def job_table(rows: Sequence[JobRow], now: datetime) -> RenderableType:
    """Return a listing of jobs; tenants are shown if there is more than the default one."""
    tenants = {row.tenant for row in rows} - {"default"}
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("job", no_wrap=True)
    table.add_column("agent", no_wrap=True, min_width=8)
    if tenants:
        table.add_column("tenant", no_wrap=True, min_width=6)
    table.add_column("state", no_wrap=True)
    table.add_column("started", no_wrap=True)
    table.add_column("took", justify="right", no_wrap=True)
    for row in rows:
        took_s = ((row.closed_at or now) - row.started_at).total_seconds()
        started = row.started_at.astimezone()
        is_today = started.date() == now.astimezone().date()
        table.add_row(
            row.job_id,
            Text(row.agent or "?"),
            *([Text(row.tenant or "?")] if tenants else []),
            Text(row.status.value, style=_STYLES[row.status]),
            f"{started:%H:%M:%S}" if is_today else f"{started:%Y-%m-%d %H:%M}",
            show_duration(max(0.0, took_s)),
        )
    return table


def job_view(report: JobReport, link: str, people: Sequence[RenderableType] = ()) -> RenderableType:
    """Return all that people see of one job: head, turns, `people`, answer or end, time, link."""
    state = Text(report.status.value, style=_STYLES[report.status])
    head = Text.assemble(
        ("job ", "bold"), report.job_id, "  ", state, "  ", report.agent or "?", " on ",
        report.model or "?", f"  started {report.started_at.astimezone():%Y-%m-%d %H:%M:%S}",
        f"  {show_duration(report.wall_s)}",
    )  # fmt: skip
    parts: list[RenderableType] = [head, _totals(report), _turn_table(report), *people]
    if report.answer is not None:
        title = "last answer" if report.status is JobStatus.STOPPED else "answer"
        parts += [Text(title, style="bold"), Text(printable(report.answer)), Text()]
    elif report.status is not JobStatus.RUNNING:
        parts += [Text(printable(verdict(report)[0]), style=_STYLES[report.status]), Text()]
    if report.unread:
        parts += [Text(_unread(report), style="yellow"), Text()]
    parts.append(time_table(report))
    if link:
        parts.append(Text(link, no_wrap=True, overflow="ignore"))
    return Group(*parts)


def _unread(report: JobReport) -> str:
    number, ids = len(report.unread), ", ".join(map(printable, report.unread[:MAX_IDS]))
    what = f"{counted(number, 'message')}: {ids}{', …' if number > MAX_IDS else ''}"
    if report.status is JobStatus.RUNNING:
        return f"not read yet: {what}"
    return f"the job ended before it read {what}"


def _totals(report: JobReport) -> Text:
    usage = report.usage
    bound = "at least " if usage.lower_bound else ""
    wasted = f", {usage.wasted_tokens:,} wasted" if usage.wasted_tokens else ""
    return Text(
        f"{counted(report.turns, 'turn')}, {counted(report.llm_steps, 'LLM step')}, "
        f"{counted(report.tool_calls, 'tool call')}; {bound}{usage.prompt_tokens:,} prompt tokens "
        f"({usage.cached_tokens:,} cached), {usage.completion_tokens:,} generated{wasted}",
        style="dim",
    )


def _turn_table(report: JobReport) -> RenderableType:
    """Return one line a step or call, and below it what it came to, at any terminal's width."""
    if not report.rows:
        return Text("\nno LLM step yet\n", style="dim")
    lines = [_Line("turn", "what", Text("state"), "prompt (cached) → out", "seconds", "tries")]
    for row in report.rows:
        if row.step:
            lines.append(_step_line(row.turn, row.step))
        lines += map(_tool_line, row.tools)
    what = max(len(line.what) for line in lines)
    state = max(len(line.state) for line in lines)
    shown = [Text()]
    for line in lines:
        shown.append(line.text(what, state, style="bold" if line is lines[0] else ""))
        for text, style in (
            (line.came_to, "dim"),
            (line.note, "yellow"),
            (line.failure, "red"),
        ):
            if text:
                shown.append(Text(f"{'':6}{text}", style, no_wrap=True, overflow="ellipsis"))
    return Group(*shown, Text())


@dataclass(frozen=True, slots=True)
class _Line:
    turn: str
    what: str
    state: Text
    tokens: str
    seconds: str
    tries: str
    came_to: str = ""
    note: str = ""
    failure: str = ""

    def text(self, what: int, state: int, style: str) -> Text:
        padding = " " * (state - len(self.state))
        return Text.assemble(
            f"{self.turn:>4}  {self.what:<{what}}  ", self.state, padding,
            f"  {self.tokens:>21}  {self.seconds:>8}  {self.tries:>5}",
            no_wrap=True, overflow="ellipsis", style=style,
        )  # fmt: skip


def _step_line(turn: int, step: StepRow) -> _Line:
    calls = ", ".join(call_text(call.tool, call.arguments) for call in step.tool_calls)
    return _Line(
        turn=str(turn),
        what="LLM step",
        state=_state(step.state),
        tokens=_tokens(step.usage) if step.time else "",
        seconds=f"{step.total_s:.2f}",
        tries=str(step.attempts or ""),
        came_to=_preview(calls or step.content or ""),
        note=_divergence(step),
        failure=_preview(step.failure or ""),
    )


def _divergence(step: StepRow) -> str:
    if step.diverged is None:
        return ""
    position, length = step.diverged.position, step.diverged.base_length
    return f"the prompt differs from its session at token {position:,} of {length:,}"


def _tool_line(tool: ToolRow) -> _Line:
    refused = tool.outcome is ToolOutcome.ERROR
    whole = f"[{tool.blob.bytes:,} bytes, whole in the store] " if tool.blob else ""
    return _Line(
        turn="",
        what=f"  {tool.tool} ({tool.sub_job})" if tool.sub_job else f"  {tool.tool}",
        state=_state("error" if refused else tool.state),
        tokens=_tokens(tool.spent.usage) if tool.spent else "",
        seconds=f"{tool.total_s:.2f}",
        tries=str(tool.attempts or ""),
        came_to=_preview(whole + (tool.content or "")),
        failure=_preview(tool.failure or ""),
    )


def _tokens(usage: Usage) -> str:
    return f"{usage.prompt_tokens:,} ({usage.cached_tokens:,}) → {usage.completion_tokens:,}"


def _state(state: str) -> Text:
    styles = {"completed": "green", "open": "cyan", "cancelled": "yellow"}
    return Text(state, style=styles.get(state, "red"))


def call_text(tool: str, arguments: Mapping[str, JsonValue]) -> str:
    """Return a tool call as one writes it: `search(query="coat")`."""
    given = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    return f"{tool}({', '.join(given)})"


def _preview(text: str) -> str:
    line = " ".join(printable(text[: 2 * PREVIEW_CHARS]).split())
    whole = len(line) <= PREVIEW_CHARS and len(text) <= 2 * PREVIEW_CHARS
    return line if whole else line[:PREVIEW_CHARS] + "…"


def counted(number: int, noun: str) -> str:
    """Return a number of things: `1 turn`, `2,000 turns`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
