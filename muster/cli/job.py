"""`muster jobs`, `muster send` and `muster cancel`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from contracts.error import BadInputError
from contracts.job import JobMessage, JobStatus
from muster import exit as way_out
from muster.cli.option import DataDir, JobArgument, Json
from muster.cli.view import console, job_table, json_text
from muster.cli.watch import watch_job
from muster.connection import connect
from muster.job import Jobs
from muster.job_id import check_job_id
from muster.job_input import read_input
from muster.job_message import new_message
from muster.settings import Settings, load_settings
from muster.yaml_tree import nearest

STATES = ", ".join(JobStatus)


def jobs(
    state: Annotated[str | None, typer.Option(help=f"Only jobs in this state: {STATES}.")] = None,
    agent: Annotated[str | None, typer.Option(help="Only jobs of this agent.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", help="At most this many.")] = 20,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """List jobs: those that run first, then the last ended."""
    settings = load_settings(data_dir=data_dir)
    status = _status(state) if state is not None else None
    _leave(_jobs(settings, status, agent, limit, as_json=as_json))


def send(
    job: JobArgument,
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="The message; @FILE reads a file, - reads stdin.")
    ],
    message_id: Annotated[
        str | None,
        typer.Option("--id", help="Name of this message: sent again under it, it is read once."),
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Send a message to a running job, which reads it at its next turn."""
    settings = load_settings(data_dir=data_dir)
    check_job_id(job)
    message = new_message(read_input(text, sys.stdin.buffer, "message"), message_id)
    _leave(_send(settings, job, message, as_json=as_json))


def cancel(
    job: JobArgument,
    wait: Annotated[
        bool, typer.Option("--wait", "-w", help="Return when the job has ended.")
    ] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Cancel a job: what it runs is aborted, what it has used is accounted for."""
    settings = load_settings(data_dir=data_dir)
    check_job_id(job)
    _leave(_cancel(settings, job, wait=wait, as_json=as_json))


def _status(state: str) -> JobStatus:
    try:
        return JobStatus(state.lower())
    except ValueError:
        guess = nearest(state, list(JobStatus))
        raise BadInputError(
            f"there is no job state {state!r}",
            hint=f"did you mean {guess}? they are {STATES}" if guess else f"they are {STATES}",
        ) from None


def _leave(program: Coroutine[Any, Any, int]) -> None:
    raise typer.Exit(asyncio.run(program))


async def _jobs(
    settings: Settings, state: JobStatus | None, agent: str | None, limit: int, *, as_json: bool
) -> int:
    found = await Jobs(await connect(settings)).list(status=state, agent=agent, limit=limit)
    if as_json:
        typer.echo(json_text({"jobs": [row.model_dump(mode="json") for row in found]}))
    elif found:
        console().print(job_table(found, datetime.now(UTC)))
    else:
        which = f"{state.value} " if state else ""
        console(stderr=True).print(f"no {which}job{f' of agent {agent}' if agent else ''}")
    return 0


async def _send(settings: Settings, job_id: str, message: JobMessage, *, as_json: bool) -> int:
    await Jobs(await connect(settings)).send(job_id, message)
    if as_json:
        typer.echo(json_text({"job_id": job_id, "message_id": message.id}))
    else:
        typer.echo(f"job {job_id} has the message {message.id}")
    return 0


async def _cancel(settings: Settings, job_id: str, *, wait: bool, as_json: bool) -> int:
    client = Jobs(await connect(settings))
    await client.cancel(job_id)
    if wait:
        await watch_job(settings, client, job_id, quiet=as_json)
    status = (await client.describe(job_id)).status
    if as_json:
        typer.echo(json_text({"job_id": job_id, "status": status.value}))
    elif status is JobStatus.RUNNING:
        typer.echo(f"job {job_id} is being cancelled")
    else:
        typer.echo(f"job {job_id}: {status.value}")
    if wait and status is not JobStatus.CANCELLED:
        way_out.print_error(
            f"job {job_id} was over before it could be cancelled: {status.value}",
            f"muster show {job_id}",
        )
        return way_out.FAILED
    return 0
