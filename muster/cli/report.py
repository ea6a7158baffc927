"""`muster report`: where the time of one job went, or of all jobs of a period."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from contracts.error import BadInputError, MusterError
from muster.cli.option import DataDir, Json
from muster.cli.view import console, json_text
from muster.duration import MAX_DURATION, parse_duration
from muster.job_id import check_job_id
from muster.settings import Settings, load_settings

if TYPE_CHECKING:  # SQLAlchemy takes long to load
    from muster.time_report import EngineTime

EARLIEST = datetime(1970, 1, 2, tzinfo=UTC)
"""No job can have ended before, in any time zone."""


def report(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="A job's id; or name a period.")
    ] = None,
    last: Annotated[
        str | None, typer.Option(help="Jobs that ended in the last time, as in 1h or 2d.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Jobs that ended since a moment, as in 2027-01-31T08:00.")
    ] = None,
    agent: Annotated[str | None, typer.Option(help="Only jobs of this agent.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only jobs of this tenant.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page to FILE, too.")
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Show where time, tokens and money went, and what would help: of a job, or of a period."""
    settings = load_settings(data_dir=data_dir)
    if job is not None:
        given = {"--last": last, "--since": since, "--agent": agent, "--tenant": tenant}
        if mixed := [name for name, value in given.items() if value is not None]:
            raise BadInputError(
                f"{mixed[0]} is for a report of many jobs, and {job[:80]!r} names one",
                hint=f"leave out the job, or {mixed[0]}",
            )
        program = _job(settings, check_job_id(job), html, as_json=as_json)
    else:
        start, until = period(last, since, datetime.now(UTC))
        program = _period(settings, start, until, agent, tenant, html, as_json=as_json)
    asyncio.run(program)


def period(last: str | None, since: str | None, now: datetime) -> tuple[datetime, datetime]:
    """Return the period that is asked for, up to `now`; raises BadInputError."""
    if (last is None) == (since is None):
        raise BadInputError(
            "name a job or one period"
            if last is None
            else "--last and --since exclude each other: both name a period",
            hint="muster report JOB, muster report --last 1h, or muster report --since 2027-01-31",
        )
    if last is not None:
        return now - _duration(last), now
    assert since is not None
    start = _moment(since)
    if start >= now:
        raise BadInputError(
            f"--since {since[:80]!r} lies ahead: it is {now:%Y-%m-%dT%H:%M} UTC now",
            hint="name a moment that has been; without an offset it is local time",
        )
    return start, now


def _duration(text: str) -> timedelta:
    try:
        return parse_duration(text)
    except ValueError:
        raise BadInputError(
            f"--last {text[:80]!r} is not a duration of up to {MAX_DURATION.days} days",
            hint="write it as 30m, 1h or 2d12h",
        ) from None


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        moment = EARLIEST
    if moment <= EARLIEST:
        raise BadInputError(
            f"--since {text[:80]!r} is no moment after {EARLIEST.year}",
            hint="write it as 2027-01-31, 2027-01-31T08:00 or 2027-01-31T08:00+01:00",
        )
    return moment


async def _job(settings: Settings, job_id: str, html: Path | None, *, as_json: bool) -> None:
    # Here, since they load templates and SQLAlchemy, which take long.
    from muster.cli.client import open_jobs
    from muster.cli.report_view import job_times_view
    from muster.cli.run import link_of
    from muster.report_page import job_page
    from muster.time_report import job_times

    async with open_jobs(settings) as jobs:
        times = job_times(await jobs.report(job_id), settings.gpu_hour_price)
    link = link_of(settings, job_id)
    if html is not None:
        _write(html, job_page(times, link))
    if as_json:
        typer.echo(json_text(times.model_dump(mode="json")))
    else:
        console().print(job_times_view(times))
        _say_written(html)


async def _period(
    settings: Settings,
    since: datetime,
    until: datetime,
    agent: str | None,
    tenant: str | None,
    html: Path | None,
    *,
    as_json: bool,
) -> None:
    from muster.cli.report_view import period_times_view
    from muster.database_url import database_url
    from muster.report_page import period_page
    from muster.time_report import period_times
    from store.database import Database
    from store.summary import Which, read_summary

    which = Which(since, until, agent, tenant)
    database = Database(database_url(settings), pool_size=1)
    try:
        await database.check()
        summary = await database.transact(lambda connection: read_summary(connection, which))
    finally:
        await database.close()
    engine = await _engine(settings)
    times = period_times(summary, which, settings.gpu_hour_price, engine)
    if html is not None:
        _write(html, period_page(times))
    if as_json:
        typer.echo(json_text(times.model_dump(mode="json")))
    else:
        console().print(period_times_view(times))
        _say_written(html)


async def _engine(settings: Settings) -> EngineTime | None:
    """Return the engine's ledger, if an inference service answers."""
    from muster.stack.state import locate
    from muster.stack.worker import inference_cohorts
    from muster.time_report import engine_time

    try:
        return engine_time(await inference_cohorts(locate(settings).inference_url))
    except (MusterError, ValueError):
        return None


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise BadInputError(
            f"{str(path)!r} cannot be written: {error.strerror or error}",
            hint="name a file in a directory that exists and may be written to",
        ) from None


def _say_written(html: Path | None) -> None:
    if html is not None:
        typer.echo(f"page written to {html}")
