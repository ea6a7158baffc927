"""Live progress of one job on standard error: a spinner line in a terminal, else plain lines."""

from __future__ import annotations

from collections.abc import AsyncIterator

from rich.text import Text

from contracts.job import JobProgress
from muster.cli.view import console, printable


async def watch(progress: AsyncIterator[JobProgress], *, quiet: bool = False) -> None:
    """Show progress until it ends; `quiet` shows nothing outside a terminal."""
    out = console(stderr=True)
    if out.is_terminal:
        with out.status(Text("starting"), spinner="dots") as status:
            async for now in progress:
                status.update(Text(_line(now), overflow="ellipsis", no_wrap=True))
        return
    shown = ""
    async for now in progress:
        line = _line(now)
        if line != shown and not quiet:
            shown = line
            out.print(Text(line), soft_wrap=True)


def _line(now: JobProgress) -> str:
    counts = f"turn {now.turns + 1}"
    if now.tool_calls:
        counts += f", {now.tool_calls} tool call{'s' if now.tool_calls > 1 else ''} so far"
    return " ".join(printable(f"{counts}: {now.doing}").split())
