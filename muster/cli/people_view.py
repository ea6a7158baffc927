"""How what people decided on a job, and what it waits for, looks in a terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from contracts.approval import JobWaits, PendingApproval
from muster.cli.view import printable
from muster.decided import DecisionKind, DecisionRow
from muster.report import JobReport

_STYLES = {
    DecisionKind.APPROVED: "green",
    DecisionKind.DENIED: "red",
    DecisionKind.EXPIRED: "red",
    DecisionKind.PAUSED: "yellow",
    DecisionKind.RESUMED: "green",
}


def people_view(report: JobReport, waits: JobWaits | None) -> list[RenderableType]:
    """Return what people have decided on a job, and what it waits for now."""
    parts: list[RenderableType] = []
    if report.decisions:
        parts.append(_table(report.decisions))
    if waits and (waits.paused or waits.pending):
        parts.append(_waits(report.job_id, waits))
    return parts


def _table(rows: Sequence[DecisionRow]) -> RenderableType:
    """Return one line for each decision: when, what, by whom, on which call, why."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("when", "people", "by", "call", "why"):
        table.add_column(title, overflow="fold")
    for row in rows:
        is_one_of_many = row.approvals is not None and (row.people or 1) > 1
        count = f" ({row.approvals} of {row.people})" if is_one_of_many else ""
        table.add_row(
            _moment(row.at),
            Text(f"{row.kind}{count}", style=_STYLES[row.kind]),
            Text(printable(row.by or "nobody")),
            Text(_call(row.tool or row.call_id, row.arguments)),
            Text(printable(row.reason)),
        )
    return table


def _waits(job_id: str, waits: JobWaits) -> RenderableType:
    """Return what a running job waits for, and what people do about it."""
    lines: list[RenderableType] = []
    if waits.paused:
        why = f": {printable(waits.paused.reason)}" if waits.paused.reason else ""
        told = f"paused by {waits.paused.by} since {_moment(waits.paused.at)}{why}"
        lines += [Text(told, style="yellow"), Text(f"  muster resume {job_id}", style="dim")]
    for call in waits.pending:
        lines.append(Text(f"waits for approval: {_call(call.tool, call.arguments)}", "yellow"))
        lines.append(Text(f"  {_state(call)}", style="dim"))
        lines.append(Text(f"  muster approve {job_id} {call.call_id}", style="dim"))
    return Group(*lines, Text())


def _state(call: PendingApproval) -> str:
    people = f"{len(call.approved_by)} of {call.people} approved"
    approved = f" ({', '.join(call.approved_by)})" if call.approved_by else ""
    expires = f"; counts as denied at {_moment(call.expires_at)}" if call.expires_at else ""
    note = f"; {printable(call.note)}" if call.note else ""
    may = ", ".join(call.by) or "anyone"
    return f"asked {_moment(call.asked_at)}; {people}{approved}; {may} may decide{expires}{note}"


def _call(tool: str | None, arguments: str | None) -> str:
    if tool is None:
        return ""
    return printable(tool if arguments is None else f"{tool}({arguments})")


def _moment(at: datetime) -> str:
    return f"{at.astimezone():%Y-%m-%d %H:%M:%S}"
