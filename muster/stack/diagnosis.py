"""What `muster doctor` looks at: each check says what it found and how to mend it.

Checks of what is installed and configured come first; those of running parts are made only where
the stack is up, or settings name the part elsewhere.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from temporalio.client import Client

from contracts.error import MusterError
from inference_service.engine.openai_wire import served_models
from muster.connection import connect
from muster.settings import ENV_PREFIX, Settings
from muster.stack.namespace import check_namespace
from muster.stack.port import check_ports
from muster.stack.postgres import choose_user, installed_programs
from muster.stack.process import Command, run_briefly
from muster.stack.queue import QUEUES, poller_pids, queues_of, waiting_tasks
from muster.stack.state import (
    PartState,
    StackPhase,
    StackRecord,
    locate,
    make_data_dir,
    running_stack,
)
from muster.stack.temporal import temporal_program
from muster.stack.worker import check_inference, inference_stats
from store.database import Database

MIN_FREE_BYTES = 1024**3
CHECK_TIMEOUT_S = 10.0
MAX_STUCK_SHOWN = 5

STUCK_JOBS = (
    'TemporalReportedProblems in ("category=WorkflowTaskFailed", "category=WorkflowTaskTimedOut")'
)
"""Visibility query for jobs whose workflow code fails again and again."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check; `hint` says how to mend what is not `ok`."""

    check: str
    ok: bool
    detail: str
    hint: str = ""


Check = Callable[[Settings], Awaitable[str]]
"""Returns what is well; raises MusterError, with a hint, for what is not."""


class _FaultError(MusterError):
    """A check found something to mend."""


async def diagnose(settings: Settings) -> list[Finding]:
    """Make every check that applies, each for at most CHECK_TIMEOUT_S."""
    record = running_stack(settings.data_dir)
    checks: dict[str, Check] = {
        "settings": _settings,
        "data directory": _data_directory,
    }
    if not settings.temporal_address:
        checks["temporal program"] = _temporal_installed
    if not settings.database_url:
        checks["postgres program"] = _postgres_installed
    if not settings.inference_url:
        checks["engine"] = _engine_installed
    if record is None:
        checks["ports"] = _ports
    checks["stack"] = _stack
    if record or settings.temporal_address:
        checks |= {"temporal": _temporal, "stuck jobs": _stuck_jobs}
        checks |= {f"{role} worker": _pollers(role) for role in QUEUES}
    if record or settings.database_url:
        checks["postgres"] = _postgres
    if record or settings.inference_url:
        checks["inference"] = _inference
    return [await _finding(name, check, settings) for name, check in checks.items()]


async def _finding(name: str, check: Check, settings: Settings) -> Finding:
    try:
        return Finding(name, True, await asyncio.wait_for(check(settings), CHECK_TIMEOUT_S))
    except MusterError as error:
        return Finding(name, False, error.message, error.hint or "see the logs")
    except TimeoutError:
        return Finding(name, False, f"no answer in {CHECK_TIMEOUT_S:.0f} s", "see the logs")
    except Exception as error:  # a doctor that falls over helps nobody
        return Finding(name, False, f"{type(error).__name__}: {error}", "see the logs")


async def _settings(settings: Settings) -> str:
    known = {f"{ENV_PREFIX}{name}".upper() for name in Settings.model_fields}
    given = {name for name in os.environ if name.startswith(ENV_PREFIX)}
    if unknown := sorted(given - known):
        raise _FaultError(f"unknown variables: {', '.join(unknown)}", hint="correct or unset them")
    version = ".".join(str(part) for part in sys.version_info[:3])
    return f"Python {version}, {len(given)} of {len(known)} settings from the environment"


async def _data_directory(settings: Settings) -> str:
    make_data_dir(settings)
    free = shutil.disk_usage(settings.data_dir).free
    if free < MIN_FREE_BYTES:
        raise _FaultError(
            f"{settings.data_dir} has {free:,} bytes free, under {MIN_FREE_BYTES:,}",
            hint="make room, or set MUSTER_DATA_DIR to a larger disk",
        )
    return f"{settings.data_dir}, {free / 1024**3:.0f} GiB free"


async def _temporal_installed(settings: Settings) -> str:
    return await run_briefly(Command(argv=[temporal_program(), "--version"], cwd=settings.data_dir))


async def _postgres_installed(settings: Settings) -> str:
    program = str(installed_programs() / "postgres")
    version = await run_briefly(Command(argv=[program, "--version"], cwd=settings.data_dir))
    user = choose_user(settings.postgres_user)
    return f"{version}, runs as {user.name if user else 'you'}"


async def _engine_installed(settings: Settings) -> str:
    if settings.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise _FaultError(
            "vLLM is not installed",
            hint="pip install 'muster[cpu]' or 'muster[gpu]', or set MUSTER_ENGINE=simulated",
        )
    if settings.engine == "openai":
        return await _engine_served(settings)
    return f"{settings.engine}, model {settings.model!r}"


async def _engine_served(settings: Settings) -> str:
    if importlib.util.find_spec("transformers") is None:
        raise _FaultError(
            "transformers is not installed, which reads the model's tokenizer",
            hint="pip install 'muster[openai]'",
        )
    names = await served_models(
        settings.openai_url, settings.openai_api_key.get_secret_value(), CHECK_TIMEOUT_S
    )
    return f"{settings.openai_url} serves {', '.join(names)}; tokenizer of {settings.model!r}"


async def _ports(settings: Settings) -> str:
    ports: dict[str, int] = {}
    if not settings.temporal_address:
        ports["temporal_port"] = settings.temporal_port
        ports["temporal_ui_port"] = settings.temporal_ui_port
    if not settings.inference_url:
        ports["inference_port"] = settings.inference_port
    check_ports(ports)
    return ", ".join(str(port) for port in ports.values()) + " are free"


async def _stack(settings: Settings) -> str:
    record = running_stack(settings.data_dir)
    if record is None:
        raise _FaultError("it is down", hint="muster up")
    _check_whole(record)
    restarts = sum(part.restarts for part in record.parts)
    return f"up, {len(record.parts)} parts, {restarts} restarts"


def _check_whole(record: StackRecord) -> None:
    if record.phase is not StackPhase.UP:
        raise _FaultError(f"it is {record.phase}", hint="wait a moment; muster status shows more")
    for part in record.parts:
        if part.message or part.state not in (PartState.UP, PartState.EXTERNAL):
            raise _FaultError(
                f"{part.name} is {part.state}: {part.message}",
                hint=f"see {part.log}; after mending it: muster down, muster up",
            )


async def _temporal(settings: Settings) -> str:
    client = await connect(settings, role="doctor")
    await check_namespace(client)
    address = locate(settings).temporal_address
    return f"{address}, namespace {client.namespace!r} has our search attributes"


async def _stuck_jobs(settings: Settings) -> str:
    client = await connect(settings, role="doctor")
    query = f'ExecutionStatus = "Running" and {STUCK_JOBS}'
    stuck = [job.id async for job in client.list_workflows(query, limit=MAX_STUCK_SHOWN + 1)]
    if stuck:
        shown = ", ".join(stuck[:MAX_STUCK_SHOWN]) + (" …" if len(stuck) > MAX_STUCK_SHOWN else "")
        raise _FaultError(
            f"workflow code fails for {shown}",
            hint="see agents.log; a fixed version heals them: muster down, muster up",
        )
    return "none"


def _pollers(role: str) -> Check:
    async def check(settings: Settings) -> str:
        client: Client = await connect(settings, role="doctor")
        record = running_stack(settings.data_dir)
        own = {part.pid for part in record.parts if part.name == role} if record else set()
        found, waits = dict[str, None](), list[str]()
        for queue, kind in queues_of(role, settings):
            pollers = await poller_pids(client, queue, kind)
            if not pollers or (own - {None} and not own & set(pollers)):
                raise _FaultError(f"nobody polls task queue {queue!r}", hint=f"see {role}.log")
            found |= dict.fromkeys(pollers.values())
            waits.append(f"{await waiting_tasks(client, queue, kind):,} tasks wait on {queue!r}")
        return f"{', '.join(found)}; {', '.join(waits)}"

    return check


async def _postgres(settings: Settings) -> str:
    database = Database(locate(settings).database_url, pool_size=1)
    try:
        await database.check()
    finally:
        await database.close()
    return "answers, migrations are complete"


async def _inference(settings: Settings) -> str:
    url = locate(settings).inference_url
    await check_inference(url)
    stats = await inference_stats(url)
    said = f"{url} is healthy" + (f", model {stats['model']}" if "model" in stats else "")
    if defect := stats.get("template_defect"):
        said += f"; its chat template costs cache hits, since {defect}"
    return said
