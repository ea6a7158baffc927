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
from muster.worker.watchdog import watched


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
    work = importlib.import_module(f"muster.worker.{role}").main(settings)
    # The inference service, whose engine may block its loop while it starts, has a health check.
    uvloop.run(work if role is Role.INFERENCE else watched(work))
