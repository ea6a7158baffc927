"""The command line: its commands are plain functions in the modules here, put together below."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer

from muster import exit as way_out
from muster import telemetry
from muster.cli import (
    approval,
    doctor,
    garbage,
    job,
    rebuild,
    report,
    retry,
    run,
    show,
    stack,
    worker,
)
from muster.cli.option import DataDir
from muster.settings import load_settings

COMMANDS = (
    stack.up,
    stack.down,
    stack.status,
    doctor.doctor,
    run.run,
    retry.retry,
    job.jobs,
    show.show,
    report.report,
    job.send,
    approval.approvals,
    approval.approve,
    approval.deny,
    approval.pause,
    approval.resume,
    job.cancel,
    garbage.gc,
    rebuild.rebuild,
)
"""In the order that `muster --help` shows them."""


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"muster {version('muster')}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option(
        "--version", callback=_print_version, is_eager=True, help="Print the version and leave."
    ),
]


def build_app() -> typer.Typer:
    """Return the app with every command on it."""
    app = typer.Typer(
        name="muster",
        help="Run LLM agents as durable workflows; nothing is lost, nothing is paid twice.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def before_command(
        context: typer.Context, data_dir: DataDir = None, show_version: Version = False
    ) -> None:
        if data_dir is not None:
            os.environ["MUSTER_DATA_DIR"] = str(data_dir)
        if context.invoked_subcommand != worker.worker.__name__:  # which names its own role
            telemetry.configure("client")

    for command in COMMANDS:
        app.command()(command)
    app.command(hidden=True)(worker.worker)
    return app


def main() -> NoReturn:
    """Run the command line and leave with its status."""
    way_out.run(_run, log_dir=lambda: load_settings().log_dir)


def _run() -> None:
    typer.main.get_command(build_app()).main(prog_name="muster")
