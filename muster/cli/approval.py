"""`muster approvals`, `approve`, `deny`, `pause` and `resume`: what people say to jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from contracts.approval import Verdict
from muster.cli.option import DataDir, JobArgument, Json
from muster.cli.view import console, json_text, printable
from muster.connection import connect
from muster.inbox import Inbox, InboxEntry, People
from muster.job_id import check_job_id
from muster.job_update import check_words, current_person, new_decision, new_pause
from muster.settings import Settings, load_settings

CallArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[CALL]",
        help="The call: its id, the end of it, or its tool. Not needed if only one waits.",
    ),
]
By = Annotated[
    str | None, typer.Option(help="Who says so; by default the name of the user.", metavar="NAME")
]
Reason = Annotated[str, typer.Option(help="Why; of a denial, the model reads it.")]


def approvals(
    person: Annotated[
        str | None,
        typer.Option("--for", metavar="NAME", help="Only what this person may decide."),
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Only jobs of this tenant.")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """List the calls, of all jobs, that wait for approval."""
    settings = load_settings(data_dir=data_dir)
    asyncio.run(_approvals(settings, person, tenant, as_json=as_json))


def approve(
    job: JobArgument,
    call: CallArgument = None,
    by: By = None,
    reason: Reason = "",
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Approve a call that waits for it."""
    settings = load_settings(data_dir=data_dir)
    asyncio.run(_decide(settings, job, call, Verdict.APPROVE, by, reason, as_json=as_json))


def deny(
    job: JobArgument,
    call: CallArgument = None,
    by: By = None,
    reason: Reason = "",
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Deny a call that waits for approval; the model is told, and the job goes on."""
    settings = load_settings(data_dir=data_dir)
    asyncio.run(_decide(settings, job, call, Verdict.DENY, by, reason, as_json=as_json))


def pause(
    job: JobArgument,
    by: By = None,
    reason: Annotated[str, typer.Option(help="Why.")] = "",
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Pause a job: what runs goes on to its end, nothing new is begun."""
    settings = load_settings(data_dir=data_dir)
    asyncio.run(_pause(settings, job, by, reason, as_json=as_json))


def resume(
    job: JobArgument, by: By = None, data_dir: DataDir = None, as_json: Json = False
) -> None:
    """Let a paused job go on."""
    settings = load_settings(data_dir=data_dir)
    asyncio.run(_resume(settings, job, by, as_json=as_json))


async def _approvals(
    settings: Settings, person: str | None, tenant: str | None, *, as_json: bool
) -> None:
    found = await People(await connect(settings)).inbox(person=person, tenant=tenant)
    if as_json:
        typer.echo(json_text(found.model_dump(mode="json")))
        return
    if found.entries:
        console().print(_table(found.entries))
    else:
        console(stderr=True).print("no call waits for approval")
    _say_what_is_missing(found)


def _say_what_is_missing(found: Inbox) -> None:
    if found.silent:
        jobs = ", ".join(found.silent[:5])
        console(stderr=True).print(
            f"{len(found.silent)} jobs wait, and could not be asked for what: {jobs}"
        )
    if found.has_more:
        console(stderr=True).print("more jobs wait than were looked at; use --for or --tenant")


async def _decide(
    settings: Settings,
    job_id: str,
    call: str | None,
    verdict: Verdict,
    by: str | None,
    reason: str,
    *,
    as_json: bool,
) -> None:
    check_job_id(job_id)
    by = by or current_person()
    check_words(by, reason)
    people = People(await connect(settings))
    meant = await people.find_call(job_id, call)
    await people.decide(job_id, new_decision(meant.call_id, verdict, by=by, reason=reason))
    if as_json:
        fields = {"job_id": job_id, "call_id": meant.call_id, "verdict": verdict.value, "by": by}
        typer.echo(json_text(fields))
        return
    done = "approved" if verdict is Verdict.APPROVE else "denied"
    left = meant.people - len(meant.approved_by) - 1
    more = f"; {left} more must approve" if verdict is Verdict.APPROVE and left > 0 else ""
    typer.echo(printable(f"{meant.tool}({meant.arguments}): {done} by {by}{more}"))


async def _pause(
    settings: Settings, job_id: str, by: str | None, reason: str, *, as_json: bool
) -> None:
    check_job_id(job_id)
    request = new_pause(by=by or current_person(), reason=reason)
    await People(await connect(settings)).pause(job_id, request)
    if as_json:
        typer.echo(json_text({"job_id": job_id, "is_paused": True}))
    else:
        typer.echo(f"job {job_id} is paused; muster resume {job_id}")


async def _resume(settings: Settings, job_id: str, by: str | None, *, as_json: bool) -> None:
    check_job_id(job_id)
    request = new_pause(by=by or current_person())
    await People(await connect(settings)).resume(job_id, request)
    if as_json:
        typer.echo(json_text({"job_id": job_id, "is_paused": False}))
    else:
        typer.echo(f"job {job_id} goes on")


def _table(found: Sequence[InboxEntry]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("JOB", "AGENT", "CALL", "CALL ID", "ASKED", "EXPIRES", "APPROVED", "MAY DECIDE"):
        table.add_column(title, overflow="fold")
    for each in found:
        call = each.call
        table.add_row(
            each.job_id,
            each.agent or "",
            printable(f"{call.tool}({call.arguments})"),
            call.call_id,
            f"{call.asked_at:%m-%d %H:%M:%S}",
            f"{call.expires_at:%m-%d %H:%M:%S}" if call.expires_at else "",
            f"{len(call.approved_by)} of {call.people}",
            ", ".join(call.by) or "anyone",
        )
    return table
