"""`muster retry`: run again what a plan's job has not done."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from muster.cli.option import DataDir, JobArgument, Json
from muster.cli.run import follow
from muster.connection import connect
from muster.job import Jobs
from muster.job_id import check_job_id
from muster.plan_job import PlanJobs
from muster.settings import Settings, load_settings


def retry(
    job: JobArgument,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Print the new job's id and leave at once.")
    ] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Go on, in a new job, with a plan that has failed: what is done is not done again."""
    settings = load_settings(data_dir=data_dir)
    check_job_id(job)
    raise typer.Exit(asyncio.run(_retry(settings, job, detach=detach, as_json=as_json)))


async def _retry(settings: Settings, job_id: str, *, detach: bool, as_json: bool) -> int:
    jobs = Jobs(await connect(settings))
    new_id = await PlanJobs(jobs).retry(job_id)
    return await follow(settings, jobs, new_id, detach=detach, as_json=as_json)
