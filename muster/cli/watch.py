"""Live progress of one job on standard error: a spinner line in a terminal, else plain lines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from contracts.job import JobProgress
from muster.cli.view import console, printable
from muster.job import Jobs
from muster.settings import Settings
from muster.stack.state import locate
from muster.token_stream import Draft, drafting

MAX_DRAFT_CHARS = 8_000
"""Of what is being written; no terminal shows half a page more."""


async def watch_job(settings: Settings, jobs: Jobs, job_id: str, *, quiet: bool = False) -> None:
    """Show a job's progress until it ends, in a terminal also what it writes."""
    url, is_seen = locate(settings).inference_url, console(stderr=True).is_terminal
    async with (
        aclosing(jobs.progress(job_id)) as progress,
        drafting(url, job_id, on=is_seen) as draft,
    ):
        await watch(progress, draft=draft, quiet=quiet)


async def watch(
    progress: AsyncIterator[JobProgress], *, draft: Draft | None = None, quiet: bool = False
) -> None:
    """Show progress until it ends; `quiet` shows nothing outside a terminal.

    In a terminal the end of `draft` stands above, while it is written; nothing of it stays.

    What the job waits for from people is told in any case, once, since nothing goes on without.
    """
    out = console(stderr=True)
    told = set[str]()

    def tell(now: JobProgress) -> None:
        if now.waits and now.waits not in told:
            told.add(now.waits)
            out.print(Text(_one_line(now.waits)), soft_wrap=True)

    if out.is_terminal:
        spinner = Spinner("dots", Text("starting"))
        with Live(get_renderable=lambda: _screen(draft, spinner, out), console=out, transient=True):
            async for now in progress:
                tell(now)
                spinner.update(text=Text(_line(now), overflow="ellipsis", no_wrap=True))
        return
    shown = ""
    async for now in progress:
        tell(now)
        line = _line(now)
        if line != shown and not quiet and now.doing != now.waits:
            shown = line
            out.print(Text(line), soft_wrap=True)


def _screen(draft: Draft | None, spinner: Spinner, out: Console) -> RenderableType:
    """Return the last lines of what is being written, as many as fit well, above the spinner."""
    text = printable(draft.text[-MAX_DRAFT_CHARS:]) if draft else ""
    if not text:
        return spinner
    lines = Text(text, style="dim").wrap(out, out.width)
    return Group(*lines[-max(1, out.height // 2) :], spinner)


def _line(now: JobProgress) -> str:
    done = [
        f"{number:,} {noun}{'' if number == 1 else 's'}"
        for number, noun in ((now.llm_steps, "LLM step"), (now.tool_calls, "tool call"))
        if number
    ]
    return _one_line(f"{now.doing}{' · ' if done else ''}{', '.join(done)}")


def _one_line(text: str) -> str:
    return " ".join(printable(text).split())
