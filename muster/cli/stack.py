"""`muster up`, `down` and `status`: the embedded stack of one data directory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.table import Table

from contracts.error import MusterError, UnavailableError
from muster import exit as way_out
from muster.cli.cohort import print_cohorts
from muster.cli.option import DataDir, Json
from muster.log import LineFormatter
from muster.settings import Settings, load_settings
from muster.stack import state
from muster.stack.log_file import said_since, size_of
from muster.stack.progress import Progress
from muster.stack.state import (
    PartRecord,
    PartState,
    StackPhase,
    StackRecord,
    hide_password,
)

PLAIN_WIDTH = 160
"""Width of the table where there is no terminal: wide enough to keep addresses whole."""

POLL_INTERVAL_S = 0.05
KILL_TIMEOUT_S = 10.0
STOP_MARGIN_S = 45.0
"""`down` waits this much longer than a worker's drain before it kills the supervisor."""


def up(
    data_dir: DataDir = None,
    model: Annotated[
        str | None, typer.Option(help="Model to serve: a packaged name, a directory, or a name.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="vllm or simulated.")] = None,
    temporal_port: Annotated[int | None, typer.Option(help="Port of Temporal.")] = None,
    ui_port: Annotated[int | None, typer.Option(help="Port of the Temporal UI.")] = None,
    inference_port: Annotated[
        int | None, typer.Option(help="HTTP port of the inference service.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return once it is up; stop it with down.")
    ] = False,
    only: Annotated[
        str, typer.Option(help="Start these parts only, separated by commas.", hidden=True)
    ] = "",
    as_json: Json = False,
) -> None:
    """Start Temporal, PostgreSQL, the inference service and the workers, and keep them up.

    In the foreground until Ctrl-C, which stops everything; with --detach in the background.
    """
    settings = load_settings(
        data_dir=data_dir,
        model=model,
        engine=engine,
        temporal_port=temporal_port,
        temporal_ui_port=ui_port,
        inference_port=inference_port,
    )
    state.make_data_dir(settings)
    parts = tuple(part.strip() for part in only.split(",") if part.strip())
    if (pid := state.holder_pid(settings.data_dir)) is not None:
        _print_up(settings, f"is up already (pid {pid})", as_json=as_json)
    elif detach:
        _start_detached(settings, parts, as_json=as_json)
    else:
        _run_here(settings, parts, as_json=as_json)


def down(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Stop the stack: workers finish what they have in hand, then everything ends."""
    settings = load_settings(data_dir=data_dir)
    pid = state.holder_pid(settings.data_dir)
    if pid is None:
        _print_down(settings, "was not up", as_json=as_json)
        return
    progress = Progress(Console(quiet=as_json))
    if record := state.read_record(settings.data_dir):
        progress.skip(record)
    deadline = time.monotonic() + settings.drain_timeout.total_seconds() + STOP_MARGIN_S
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        while state.is_locked(settings.data_dir):
            if time.monotonic() > deadline:
                _kill_stack(settings, pid)
                break
            if record := state.read_record(settings.data_dir):
                progress.update(record)
            time.sleep(POLL_INTERVAL_S)
    progress.close()
    _print_down(settings, "is down", as_json=as_json)


def status(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Show the parts of the stack and what its scheduler sees; exit status 0 only if all is up."""
    settings = load_settings(data_dir=data_dir)
    record = state.running_stack(settings.data_dir)
    inference, cohorts = asyncio.run(_inference(record)) if record else (None, None)
    whole = record is not None and _is_whole(record)
    if as_json:
        shown = record.model_dump(mode="json") if record else {"phase": "down", "parts": []}
        print(
            json.dumps({"up": whole, **shown, "inference": inference, "cohorts": cohorts}, indent=2)
        )
    elif record is None:
        print(f"The stack of {settings.data_dir} is down. Start it with: muster up")
    else:
        _print_status(record, inference, cohorts)
    if not whole:
        raise typer.Exit(way_out.FAILED)


def _run_here(settings: Settings, parts: tuple[str, ...], *, as_json: bool) -> None:
    """Be the supervisor until told to stop."""
    # Here, since no other command needs the servers' clients and drivers.
    from muster.stack.supervisor import PART_NAMES, Supervisor

    progress = Progress(Console(quiet=as_json))
    shown: list[StackPhase] = []

    def changed(record: StackRecord) -> None:
        progress.update(record)
        if record.phase is StackPhase.UP and StackPhase.UP not in shown:
            shown.append(record.phase)
            _print_up(settings, "is up", as_json=as_json)
            if not as_json and sys.stdout.isatty():
                print("Ctrl-C stops it.")
            sys.stdout.flush()

    async def supervise() -> None:
        await Supervisor(settings, only=parts or PART_NAMES, changed=changed).run()

    with state.hold_lock(settings.data_dir) as held:
        if not held:
            _print_up(settings, "is up already", as_json=as_json)
            return
        _log_to_file(settings)
        try:
            asyncio.run(supervise())
        finally:
            progress.close()


def _start_detached(settings: Settings, parts: tuple[str, ...], *, as_json: bool) -> None:
    """Start the supervisor in a session of its own and wait until it is up or has failed."""
    log = settings.log_dir / "stack.log"
    offset = size_of(log)
    argv = [sys.executable, "-m", "muster", "up"] + (["--only", ",".join(parts)] if parts else [])
    with log.open("ab") as output:
        process = subprocess.Popen(
            argv,
            env={**os.environ, **settings.environment()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    progress = Progress(Console(quiet=as_json))
    try:
        while process.poll() is None:
            record = state.read_record(settings.data_dir)
            if record and record.supervisor_pid == process.pid:
                progress.update(record)
                if record.phase is StackPhase.UP:
                    _print_up(settings, "is up", as_json=as_json)
                    return
            time.sleep(POLL_INTERVAL_S)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    finally:
        progress.close()
    if state.is_locked(settings.data_dir):
        _print_up(settings, "is up already", as_json=as_json)
        return
    said = said_since(log, offset)
    raise UnavailableError(
        said.message if said else f"the stack ended with status {process.returncode}",
        hint=said.hint if said else f"see {log}",
    )


def _kill_stack(settings: Settings, pid: int) -> None:
    """Kill a supervisor that does not end; the kernel then ends its children."""
    record = state.read_record(settings.data_dir)
    pids = [pid, *(part.pid for part in record.parts if part.pid)] if record else [pid]
    processes = [psutil.Process(number) for number in pids if psutil.pid_exists(number)]
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=KILL_TIMEOUT_S)
    state.remove_record(settings.data_dir)


def _log_to_file(settings: Settings) -> None:
    """Write the supervisor's own log lines to its file; the terminal is for progress."""
    handler = logging.FileHandler(settings.log_dir / "stack.log")
    handler.setFormatter(LineFormatter("stack"))
    logging.basicConfig(level=settings.log_level, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def _print_up(settings: Settings, what: str, *, as_json: bool) -> None:
    record = state.running_stack(settings.data_dir)
    if as_json:
        print(record.model_dump_json(indent=2) if record else "{}")
        return
    print(f"The stack of {settings.data_dir} {what}.")
    if record is None:
        return
    names = {part.name for part in record.parts}
    if record.temporal_ui_url and "temporal" in names:
        print(f"  Temporal UI   {record.temporal_ui_url}")
    if "temporal" in names:
        print(f"  Temporal      {record.temporal_address}")
    if "postgres" in names:
        print(f"  PostgreSQL    {hide_password(record.database_url)}")
    if "inference" in names:
        print(f"  Inference     {record.inference_url}  (model {record.model}, {record.engine})")
    print(f"  Logs          {settings.log_dir}")


def _print_down(settings: Settings, what: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"up": False, "data_dir": str(settings.data_dir)}))
    else:
        print(f"The stack of {settings.data_dir} {what}.")


def _print_status(
    record: StackRecord, inference: dict[str, Any] | None, cohorts: dict[str, Any] | None
) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("part", "state", "pid", "uptime", "restarts", "address"):
        table.add_column(column, justify="right" if column in ("pid", "restarts") else "left")
    table.add_row("stack", record.phase, str(record.supervisor_pid), _uptime(record.since), "", "")
    for part in record.parts:
        table.add_row(
            part.name,
            part.state,
            str(part.pid or ""),
            _uptime(part.since) if part.pid else "",
            "" if part.state is PartState.EXTERNAL else str(part.restarts),
            hide_password(part.address) + (f"  ({part.message})" if part.message else ""),
        )
    console = Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    console.print(table, highlight=False)
    if record.temporal_ui_url:
        console.print(f"\nTemporal UI  {record.temporal_ui_url}", highlight=False)
    if inference:
        pairs = ", ".join(f"{key} {value}" for key, value in inference.items())
        console.print(f"Inference    {pairs}", highlight=False, soft_wrap=True)
    if cohorts:
        print_cohorts(console, cohorts)


async def _inference(
    record: StackRecord,
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return the inference service's statistics and its scheduler's view, where it answers."""
    from muster.stack.worker import inference_cohorts, inference_stats

    if not any(part.name == "inference" and _is_up(part) for part in record.parts):
        return None, None
    with contextlib.suppress(MusterError, ValueError):
        stats = await inference_stats(record.inference_url)
        return stats, await inference_cohorts(record.inference_url)
    return None, None


def _is_whole(record: StackRecord) -> bool:
    return record.phase is StackPhase.UP and all(_is_up(part) for part in record.parts)


def _is_up(part: PartRecord) -> bool:
    return part.state in (PartState.UP, PartState.EXTERNAL) and not part.message


def _uptime(since: float | None) -> str:
    """Return the time since a Unix time, in its two largest units."""
    if since is None:
        return ""
    seconds = max(0, int(time.time() - since))
    days, hours, minutes = seconds // 86_400, seconds // 3_600 % 24, seconds // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds % 60} s" if minutes else f"{seconds} s"
