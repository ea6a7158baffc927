"""Live progress of one job on standard error: a spinner line in a terminal, else plain lines."""

from __future__ import annotations

from collections.abc import AsyncIterator

from rich.text import Text

from contracts.job import JobProgress
from muster.cli.view import console, printable


async def watch(progress: AsyncIterator[JobProgress], *, quiet: bool = False) -> None:
    """Show progress until it ends; `quiet` shows nothing outside a terminal.

    What the job waits for from people is told in any case, once, since nothing goes on without.
    """
    out = console(stderr=True)
    told = set[str]()

    def tell(now: JobProgress) -> None:
        if now.waits and now.waits not in told:
            told.add(now.waits)
            out.print(Text(_one_line(now.waits)), soft_wrap=True)

    if out.is_terminal:
        with out.status(Text("starting"), spinner="dots") as status:
            async for now in progress:
                tell(now)
                status.update(Text(_line(now), overflow="ellipsis", no_wrap=True))
        return
    shown = ""
    async for now in progress:
        tell(now)
        line = _line(now)
        if line != shown and not quiet and now.doing != now.waits:
            shown = line
            out.print(Text(line), soft_wrap=True)


def _line(now: JobProgress) -> str:
    done = [
        f"{number:,} {noun}{'' if number == 1 else 's'}"
        for number, noun in ((now.llm_steps, "LLM step"), (now.tool_calls, "tool call"))
        if number
    ]
    return _one_line(f"{now.doing}{' · ' if done else ''}{', '.join(done)}")


def _one_line(text: str) -> str:
    return " ".join(printable(text).split())
