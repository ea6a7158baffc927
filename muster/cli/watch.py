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
    done = [
        f"{number:,} {noun}{'' if number == 1 else 's'}"
        for number, noun in ((now.llm_steps, "LLM step"), (now.tool_calls, "tool call"))
        if number
    ]
    return " ".join(printable(f"{now.doing}{' · ' if done else ''}{', '.join(done)}").split())
