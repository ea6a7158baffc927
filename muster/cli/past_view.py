"""How a conversation, and the size of a history, look in a terminal. Pure: data in, text out."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from contracts.message import Role
from muster.cli.view import call_text, printable
from muster.history_size import HistorySize
from muster.transcript import Entry, Transcript

PREVIEW_CHARS = 400
PREVIEW_LINES = 8
"""Of one message, unless all is asked for."""

_STYLES = {
    Role.SYSTEM: "bold magenta",
    Role.USER: "bold cyan",
    Role.ASSISTANT: "bold green",
    Role.TOOL: "bold yellow",
}


def transcript_view(transcript: Transcript, *, full: bool) -> RenderableType:
    """Return a conversation, message by message; long ones shortened unless `full`."""
    parts: list[RenderableType] = []
    for number, entry in enumerate(transcript.entries, 1):
        parts += [
            _heading(number, entry),
            Padding(_content(entry, full=full), (0, 0, 1, 2)),
        ]
    for call in transcript.unanswered:
        parts.append(Text(f"no answer yet: {printable(call_text(call.tool, call.arguments))}"))
    for message in transcript.unread:
        heading = Text.assemble(
            ("  -  ", "dim"), (Role.USER.value, _STYLES[Role.USER]), f"  {printable(message.id)}",
            ("  (unread)", "yellow"),
        )  # fmt: skip
        text = printable(message.text) if full else _shortened(message.text)
        parts += [heading, Padding(Text(text), (0, 0, 1, 2))]
    return Group(*parts) if parts else Text("no message yet", style="dim")


def _heading(number: int, entry: Entry) -> Text:
    message = entry.message
    heading = Text.assemble((f"{number:>3}  ", "dim"), (message.role.value, _STYLES[message.role]))
    if message.tool:
        heading.append(f" {printable(message.tool)}")
    if message.tool_call_id:
        heading.append(f"  {printable(message.tool_call_id)}", style="dim")
    if not entry.stored:
        heading.append("  (not stored yet)", style="dim")
    return heading


def _content(entry: Entry, *, full: bool) -> Text:
    message = entry.message
    text = Text(printable(message.content) if full else _shortened(message.content))
    if message.blob and not entry.whole:
        why = "the store no longer has it whole" if full else "--full shows it whole"
        text.append(f"\n[the beginning of {message.blob.bytes:,} bytes; {why}]", style="dim")
    for call in message.tool_calls:
        asked = call_text(call.tool, call.arguments)
        shown = printable(asked) if full else _shortened(asked)
        text.append(f"{chr(10) if text else ''}→ {shown}", style="dim")
    return text


def _shortened(text: str) -> str:
    lines = printable(text[:PREVIEW_CHARS]).split("\n")[:PREVIEW_LINES]
    shown = "\n".join(lines)
    left = len(text) - len(shown)
    return shown if left <= 0 else f"{shown}… ({left:,} more characters; --full shows all)"


def size_view(size: HistorySize) -> RenderableType:
    """Return what takes the bytes of a history."""
    parts: list[RenderableType] = [
        Text(f"history of job {size.job_id}: {size.bytes:,} bytes in {size.events:,} events"),
        _kinds(size),
    ]
    if len(size.runs) > 1:
        parts.append(_runs(size))
    if largest := size.largest_payload:
        where = f"event {largest.event_id}, {largest.what}"
        run = f" of run {largest.run_id}" if len(size.runs) > 1 else ""
        parts.append(Text(f"largest payload: {largest.bytes:,} bytes in {where}{run}"))
    return Group(*parts)


def _kinds(size: HistorySize) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("what")
    for name in ("events", "bytes", "share"):
        table.add_column(name, justify="right")
    for kind in size.kinds:
        table.add_row(kind.what, f"{kind.count:,}", f"{kind.bytes:,}", f"{100 * kind.share:.1f}%")
    return table


def _runs(size: HistorySize) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("run")
    for name in ("events", "bytes"):
        table.add_column(name, justify="right")
    for run in size.runs:
        table.add_row(run.run_id, f"{run.events:,}", f"{run.bytes:,}")
    return table
