"""`muster worker NAME`: the processes that the supervisor starts; hidden from people's help."""

from __future__ import annotations

import importlib
from enum import StrEnum
from typing import Annotated

import typer
import uvloop

from muster import exit as way_out
from muster import log, telemetry
from muster.settings import load_settings


class Role(StrEnum):
    """What a worker process does."""

    AGENTS = "agents"
    TOOLS = "tools"
    INFERENCE = "inference"


def worker(role: Annotated[Role, typer.Argument(help="Which worker to be.")]) -> None:
    """Run one worker process until SIGTERM."""
    # Its standard error is its log, so its tracebacks belong there.
    way_out.run(lambda: _work(role))


def _work(role: Role) -> None:
    settings = load_settings()
    log.configure(role, settings.log_level)
    telemetry.configure(role)
    module = importlib.import_module(f"muster.worker.{role}")
    uvloop.run(module.main(settings))
