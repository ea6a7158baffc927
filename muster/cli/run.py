"""`muster run`: start a job of an agent or a plan, show its progress, its answer and its time."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from contracts.agent import AgentSpec
from contracts.error import BadInputError
from contracts.job import JobStatus
from contracts.plan import LLMNode, Plan
from muster import exit as way_out
from muster.cli.option import DataDir, Json
from muster.cli.view import console, json_text, printable, time_table, verdict
from muster.cli.watch import watch_job
from muster.connection import connect
from muster.duration import parse_duration
from muster.job import Jobs
from muster.job_id import new_job_id, ui_link
from muster.job_input import read_input
from muster.plan_file import load_file
from muster.plan_job import read_plan_input
from muster.report import JobReport
from muster.settings import Settings, load_settings
from muster.stack.state import locate, running_stack
from muster.unserved import unserved_queues
from workflows.plan_agent import tool_agent
from workflows.plan_check import check_plan_input
from workflows.plan_graph import all_nodes
from workflows.plan_state import PlanRunInput


def run(
    agent_file: Annotated[
        Path, typer.Argument(metavar="FILE.yaml", help="File that declares the agent or the plan.")
    ],
    text: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="The input, of a plan a JSON object; @FILE reads a file, - reads stdin.",
        ),
    ],
    tenant: Annotated[str, typer.Option(help="Whom the job is for.")] = "default",
    priority: Annotated[
        int, typer.Option(min=1, max=5, help="1 to 5; a lower number is served earlier.")
    ] = 3,
    deadline: Annotated[
        str | None,
        typer.Option(help="Time from now, as in 10m, after which the answer is worthless."),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Print the job id and leave at once.")
    ] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Run one job and print its answer and where its time went.

    Ctrl-C leaves the job running and says how to come back to it.
    """
    settings = load_settings(data_dir=data_dir)
    spec = load_file(agent_file, settings.tool_path)
    _check_models(spec, settings)
    given = read_input(text, sys.stdin.buffer)
    if isinstance(spec, Plan):
        check_plan_input(spec, read_plan_input(spec, given))
    until = _deadline(deadline)
    job_id = new_job_id()
    started = _Started()
    try:
        status = asyncio.run(
            _run(settings, spec, given, job_id, started, tenant=tenant, priority=priority,
                 deadline=until, detach=detach, as_json=as_json)
        )  # fmt: skip
    except KeyboardInterrupt:
        if started.asked:
            sure = "goes on" if started.certain else "may have started"
            console(stderr=True).print(
                f"detached: job {job_id} {sure}; come back with: muster show {job_id} --wait"
            )
        raise typer.Exit(way_out.INTERRUPTED) from None
    raise typer.Exit(status)


class _Started:
    """How far a start has come, for the one who is interrupted."""

    asked = False
    certain = False


async def _run(
    settings: Settings,
    spec: AgentSpec | Plan,
    text: str,
    job_id: str,
    started: _Started,
    *,
    tenant: str,
    priority: int,
    deadline: datetime | None,
    detach: bool,
    as_json: bool,
) -> int:
    where = locate(settings)
    client = await connect(settings)
    jobs = Jobs(client)
    for line in await unserved_queues(client, _with_tools(spec)):
        console(stderr=True).print(f"warning: {printable(line)}", soft_wrap=True, markup=False)
    started.asked = True
    if isinstance(spec, Plan):
        plan_job = PlanRunInput(
            plan=spec, input=read_plan_input(spec, text), model=spec.model or where.model,
            tenant=tenant, priority=priority, deadline=deadline,
        )  # fmt: skip
        await jobs.start_plan(plan_job, job_id=job_id)
    else:
        await jobs.start(
            spec, text, model=where.model, tenant=tenant, priority=priority, deadline=deadline,
            job_id=job_id,
        )  # fmt: skip
    started.certain = True
    return await follow(settings, jobs, job_id, detach=detach, as_json=as_json)


async def follow(
    settings: Settings, jobs: Jobs, job_id: str, *, detach: bool, as_json: bool
) -> int:
    """Show a job that was started until it has ended, then what it came to; return the status."""
    link = link_of(settings, job_id)
    if detach:
        typer.echo(json_text({"job_id": job_id, "status": "running"}) if as_json else job_id)
        return 0
    if not as_json:
        console(stderr=True).print(f"job {job_id}  {link}".strip(), soft_wrap=True)
    await watch_job(settings, jobs, job_id, quiet=as_json)
    report = await jobs.report(job_id)
    if as_json:
        typer.echo(json_text(report.summary()))
    else:
        _print_report(report, link)
    return say_end(report)


def link_of(settings: Settings, job_id: str) -> str:
    """Return the address of a job in the Temporal UI, or an empty text where it is not known."""
    ui_url = locate(settings).temporal_ui_url
    return ui_link(ui_url, settings.temporal_namespace, job_id) if ui_url else ""


def say_end(report: JobReport) -> int:
    """Return 0 if the job has an answer, else say on standard error how it ended and return 1."""
    if report.status is JobStatus.COMPLETED and report.answer is not None:
        return 0
    message, hint = verdict(report)
    way_out.print_error(printable(message), printable(hint))
    return way_out.FAILED


def _print_report(report: JobReport, link: str) -> None:
    out = console()
    if report.answer is not None:
        typer.echo(printable(report.answer))
    if report.rows:
        out.print(time_table(report))
    if link:
        out.print(link, soft_wrap=True)


def _deadline(text: str | None) -> datetime | None:
    """Return the time that lies `text` ahead."""
    if text is None:
        return None
    try:
        return datetime.now(UTC) + parse_duration(text)
    except ValueError:
        raise BadInputError(
            f"--deadline {text!r} is no duration", hint="write it as in 30s, 10m or 1h30m"
        ) from None


def _check_models(spec: AgentSpec | Plan, settings: Settings) -> None:
    """Refuse a model which the running stack does not serve: its steps would never start."""
    stack = running_stack(settings.data_dir)
    if stack is None or settings.inference_url:
        return
    for who, model in _models(spec):
        if model not in (None, stack.model):
            raise BadInputError(
                f"{who} wants model {model!r}, this stack serves {stack.model!r}",
                hint="leave `model` out of the file, or start the stack with --model",
            )


def _with_tools(spec: AgentSpec | Plan) -> AgentSpec:
    return tool_agent(spec) if isinstance(spec, Plan) else spec


def _models(spec: AgentSpec | Plan) -> Iterator[tuple[str, str | None]]:
    """Yield who of a file names which model."""
    yield f"{'plan' if isinstance(spec, Plan) else 'agent'} {spec.name!r}", spec.model
    if isinstance(spec, Plan):
        for name, node in all_nodes(spec.nodes):
            if isinstance(node, LLMNode):
                yield f"node {name!r}", node.model
        for each in spec.agents:
            yield from _models(each.agent)
