"""`muster show`: what a job did, its conversation, or what takes the bytes of its history."""

from __future__ import annotations

import asyncio
from enum import Enum, auto
from typing import Annotated

import typer
from pydantic import BaseModel
from rich.console import RenderableType

from contracts.error import BadInputError
from contracts.job import JobStatus
from muster.cli.client import open_jobs
from muster.cli.option import DataDir, JobArgument, Json
from muster.cli.past_view import size_view, transcript_view
from muster.cli.people_view import people_view
from muster.cli.plan_view import node_table
from muster.cli.run import link_of, say_end
from muster.cli.view import console, job_view, json_text
from muster.cli.watch import watch_job
from muster.history_size import history_size
from muster.job import Jobs
from muster.job_id import check_job_id
from muster.plan_job import PlanJobs
from muster.settings import Settings, load_settings
from muster.transcript import read_transcript


class _What(Enum):
    REPORT = auto()
    TRANSCRIPT = auto()
    HISTORY_SIZE = auto()


def show(
    job: JobArgument,
    wait: Annotated[
        bool, typer.Option("--wait", "-w", help="Follow the job to its end first.")
    ] = False,
    transcript: Annotated[
        bool, typer.Option("--transcript", help="Show its conversation, message by message.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="With --transcript: show all texts whole.")
    ] = False,
    size: Annotated[
        bool, typer.Option("--history-size", help="Show what takes the bytes of its history.")
    ] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Show what a job did turn by turn, its answer, and where its time went."""
    settings = load_settings(data_dir=data_dir)
    check_job_id(job)
    what = _choose(transcript=transcript, full=full, size=size)
    raise typer.Exit(asyncio.run(_show(settings, job, what, wait=wait, full=full, as_json=as_json)))


def _choose(*, transcript: bool, full: bool, size: bool) -> _What:
    if transcript and size:
        raise BadInputError(
            "--transcript and --history-size exclude each other", hint="ask for one at a time"
        )
    if full and not transcript:
        raise BadInputError("--full is for --transcript alone", hint="add --transcript")
    return _What.TRANSCRIPT if transcript else _What.HISTORY_SIZE if size else _What.REPORT


async def _show(
    settings: Settings, job_id: str, what: _What, *, wait: bool, full: bool, as_json: bool
) -> int:
    async with open_jobs(settings) as jobs:
        if wait:
            await watch_job(settings, jobs, job_id, quiet=as_json)
        match what:
            case _What.REPORT:
                return await _show_report(settings, jobs, job_id, wait=wait, as_json=as_json)
            case _What.TRANSCRIPT:
                found = await read_transcript(jobs.histories, job_id, whole=full)
                _print(found, transcript_view(found, full=full), as_json=as_json)
            case _What.HISTORY_SIZE:
                measured = history_size(await jobs.histories.read(job_id))
                _print(measured, size_view(measured), as_json=as_json)
        return say_end(await jobs.report(job_id)) if wait else 0


async def _show_report(
    settings: Settings, jobs: Jobs, job_id: str, *, wait: bool, as_json: bool
) -> int:
    report = await jobs.report(job_id)
    link = link_of(settings, job_id)
    waits = await jobs.waits(job_id) if report.status is JobStatus.RUNNING else None
    plan = await PlanJobs(jobs).progress(job_id) if report.is_plan else None
    if as_json:
        shown = {
            **report.model_dump(mode="json"),
            "waits": waits.model_dump(mode="json") if waits else None,
            "temporal_ui": link or None,
        }
        if report.is_plan:
            shown["plan"] = plan.model_dump(mode="json") if plan else None
        typer.echo(json_text(shown))
    else:
        if plan is not None:
            console().print(node_table(plan), "")
        console().print(job_view(report, link, people_view(report, waits)))
    return say_end(report) if wait else 0


def _print(value: BaseModel, view: RenderableType, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json_text(value.model_dump(mode="json")))
    else:
        console().print(view)
