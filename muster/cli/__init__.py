"""The command line. Each module here that has commands registers them on the one app."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import NoReturn

import typer

from muster import exit as way_out
from muster.cli.option import DataDir
from muster.settings import load_settings

COMMANDS = ("stack", "doctor", "run", "job", "worker")
"""Modules of this package, in the order `muster --help` shows their commands; each has
`register(app)`."""


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
    def use_data_dir(data_dir: DataDir = None) -> None:
        if data_dir is not None:
            os.environ["MUSTER_DATA_DIR"] = str(data_dir)

    for name in COMMANDS:
        if importlib.util.find_spec(f"muster.cli.{name}"):
            importlib.import_module(f"muster.cli.{name}").register(app)
    return app


def main() -> NoReturn:
    """Run the command line and leave with its status."""
    command = typer.main.get_command(build_app())
    way_out.run(lambda: command.main(prog_name="muster"), log_dir=lambda: load_settings().log_dir)
