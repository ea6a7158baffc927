"""Run the examples as a newcomer would see them: a dozen jobs at once, on one embedded stack.

`python -m examples.demo` brings the stack up if it is not up, starts the weather service, runs all
jobs of `examples/case.py` concurrently, prints each answer as it comes with whether it holds the
facts it should, then where the time of all jobs went. Exit status 0: every job ended with an
answer; whether the small model's answers are right is shown and counted. What the demo started it
stops at the end, unless KEEP=1.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.text import Text

from contracts.error import UnavailableError
from examples.case import Case, cases
from examples.weather.launch import running_service
from muster import exit as way_out
from muster.agent_file import load_agent
from muster.cli.view import call_text, console, printable, time_table, verdict
from muster.connection import connect
from muster.job import Jobs
from muster.report import JobReport
from muster.settings import Settings, load_settings
from muster.stack.state import locate, running_stack

ROOT = Path(__file__).resolve().parents[1]
LOOK_EVERY = timedelta(seconds=1)
"""How often the live line asks each job what it does."""


def main() -> int:
    """Return the exit status: 0 if every job ended with an answer."""
    settings = load_settings()
    keep = os.environ.get("KEEP", "") not in ("", "0")
    out = console()
    with running_service(), _stack(settings, keep=keep):
        reports = asyncio.run(_run_all(settings, out))
        out.print(time_table(*reports))
    _print_link(settings, out, keep=keep)
    return 0 if all(map(_is_answered, reports)) else way_out.FAILED


async def _run_all(settings: Settings, out: Console) -> list[JobReport]:
    """Run all cases at once; print each answer when it comes."""
    jobs = Jobs(await connect(settings))
    model = locate(settings).model
    chosen = cases(datetime.now().astimezone().date())
    agents = {file: load_agent(ROOT / file, [ROOT]) for file in {case.agent for case in chosen}}
    begun = time.monotonic()
    ids = [await jobs.start(agents[case.agent], case.input, model=model) for case in chosen]
    out.print(f"{len(ids)} jobs started, on {model}\n")
    with Live(out, len(ids)) as live:

        async def finish(case: Case, job_id: str) -> JobReport:
            async with contextlib.aclosing(jobs.progress(job_id, every=LOOK_EVERY)) as progress:
                async for now in progress:
                    live.show(now.doing)
            report = await jobs.report(job_id)
            live.end()
            _print_answer(out, case, report)
            return report

        reports = await asyncio.gather(*map(finish, chosen, ids))
    sizes = [row.step.cohort_size for r in reports for row in r.rows if row.step]
    sizes = [size for size in sizes if size]
    # Each cohort of n steps is told by n steps, so 1/n of each sums to the number of cohorts.
    cohorts = sum(1 / size for size in sizes)
    right = sum(map(Case.holds, chosen, [report.answer for report in reports]))
    out.print(f"{right} of {len(reports)} answers hold the facts they should")
    out.print(f"{len(reports)} jobs in {time.monotonic() - begun:.1f} s, all at once")
    if sizes:
        mean, largest = len(sizes) / cohorts, max(sizes)
        out.print(f"{len(sizes)} LLM steps, mean cohort size {mean:.2f}, the largest {largest}")
    return list(reports)


class Live:
    """In a terminal, one line that says how many jobs have ended and what one of them does now."""

    def __init__(self, out: Console, jobs: int) -> None:
        self._status = out.status("") if out.is_terminal else None
        self._jobs, self._ended = jobs, 0

    def __enter__(self) -> Self:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status:
            self._status.stop()

    def show(self, doing: str) -> None:
        """Say what a job does now."""
        if self._status:
            line = f"{self._ended} of {self._jobs} jobs have ended; one: {doing}"
            self._status.update(Text(line, no_wrap=True, overflow="ellipsis"))

    def end(self) -> None:
        """Count a job that has ended."""
        self._ended += 1


def _is_answered(report: JobReport) -> bool:
    return report.answer is not None and report.answer.strip() != ""


def _print_answer(out: Console, case: Case, report: JobReport) -> None:
    if report.answer is not None and _is_answered(report):
        mark = "[green]ok   [/]" if case.holds(report.answer) else "[yellow]wrong[/]"
        said = printable(report.answer)
    else:
        mark, said = "[red]ended[/]", " ".join(verdict(report))
    out.print(f"{mark} [bold]{case.input}[/]", soft_wrap=True)
    out.print(f"      {said.strip()}", markup=False, soft_wrap=True)
    tools = [tool for row in report.rows for tool in row.tools]
    calls = [call_text(tool.tool, tool.arguments) for tool in tools]
    out.print(
        f"      {' → '.join(calls)}   {report.wall_s:.1f} s\n",
        markup=False,
        style="dim",
        soft_wrap=True,
    )


def _print_link(settings: Settings, out: Console, *, keep: bool) -> None:
    ui_url = locate(settings).temporal_ui_url
    link = f"{ui_url}/namespaces/{settings.temporal_namespace}/workflows"
    if running_stack(settings.data_dir):
        out.print(f"Temporal UI: {link}", soft_wrap=True)
    elif not keep:
        out.print(f"Temporal UI: {link}  (after `make up`, with these same jobs)", soft_wrap=True)


@contextlib.contextmanager
def _stack(settings: Settings, *, keep: bool) -> Iterator[None]:
    """Bring the stack up if it is not, with the examples on the tool worker's path."""
    if running_stack(settings.data_dir):
        yield
        return
    _muster("up", "--detach")
    try:
        yield
    finally:
        if not keep:
            _muster("down")


def _muster(*arguments: str) -> None:
    environment = os.environ | {"MUSTER_TOOL_PATH": str(ROOT), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "muster", *arguments]
    if status := subprocess.run(command, env=environment, check=False).returncode:
        raise UnavailableError(
            f"`muster {' '.join(arguments)}` ended with status {status}", hint="muster doctor"
        )


if __name__ == "__main__":
    way_out.run(main)
