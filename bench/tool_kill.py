"""Kill the tool worker between a payment and its record, many times: is each key charged once?

`python -m bench.tool_kill [--kills 100] [--seed N] [--json FILE]` runs jobs that pay, on the
embedded Temporal and PostgreSQL, with a tool worker and a payment server in processes of their own.
The tool worker is killed with SIGKILL at a random time while the payment server has charged and not
answered yet. Every job must end right, with each of its calls charged once, under one key.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import sqlalchemy as sa
from temporalio.client import Client
from temporalio.worker import Worker

from bench.payment_server import payment_server
from bench.payment_tool import HOLD_S, SERVER
from bench.stack import embedded_stack, simulated_service
from contracts.agent import AgentSpec, Limits, RetryPolicy, ToolRef
from contracts.job import AgentJobResult
from contracts.name import AGENTS_QUEUE
from inference_service.engine.protocol import EngineRequest
from inference_service.engine.simulated import SimulatedConfig, SimulatedEngine
from inference_service.worker import WorkerSettings, serve
from muster import exit as way_out
from muster.connection import connect_to
from muster.job import Jobs
from store.database import Database
from store.schema import tool_ledger
from workflows import option
from workflows.worker import workflow_options

JOBS = 4
"""Jobs at a time."""

TURNS, PARALLEL = 2, 2
"""What a job pays: in each of its turns so many calls at once."""

LOST_AFTER = timedelta(seconds=3)
"""Heartbeat timeout: calls are shorter, so that only a killed worker is silent so long."""

CHARGED_TIMEOUT_S = 60.0
"""The longest wait for the next charge."""

RETRY = RetryPolicy(initial_interval=timedelta(milliseconds=200))

PAYER = AgentSpec(
    name="payer",
    instructions="Pay.",
    tools=(ToolRef(function="bench.payment_tool:charge", retry=RETRY),),
    max_parallel_tool_calls=PARALLEL,
    limits=Limits(max_turns=TURNS + 1, max_wall_time=timedelta(minutes=10)),
)


def amount_of(turn: int, place: int) -> int:
    """Return what the call at a place of a turn pays."""
    return 100 * turn + place


def pay_then_answer(request: EngineRequest, prompt: str) -> str:
    """Answer as the model: pay in each turn, then repeat what the payments said."""
    turn = int(request.request_id.split("#")[0].rpartition("/")[2])
    if turn > TURNS:
        return json.dumps({"answer": f"{prompt.count('charged ')} payments"})
    call = [
        {"tool": "charge", "arguments": {"amount": amount_of(turn, place)}}
        for place in range(PARALLEL)
    ]
    return json.dumps({"calls": call})


class ToolWorker:
    """`muster worker tools` as a process that is killed and started again."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; it polls after a second or two."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "muster", "worker", "tools"],
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        """Kill it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


async def measure(address: str, database_url: str, kills: int, seed: int) -> dict[str, Any]:
    """Kill so often, let every job end, and return what the payment server and the ledger show."""
    chance, model = random.Random(seed), f"payer-{uuid4().hex[:8]}"
    client, database = await connect_to(address), Database(database_url)
    with payment_server() as url, tempfile.TemporaryDirectory() as data_dir:
        worker = ToolWorker(worker_environment(address, database_url, data_dir) | {SERVER: url})
        async with _agents_and_model(client, database, model), httpx.AsyncClient() as http:
            worker.start()
            jobs = [asyncio.create_task(_jobs_until(client, model, done := asyncio.Event()))]
            jobs += [asyncio.create_task(_jobs_until(client, model, done)) for _ in range(JOBS - 1)]
            begun, charges = time.monotonic(), 0
            try:
                for _ in range(kills):
                    charges = await _until_charged(http, url, charges, jobs)
                    await asyncio.sleep(chance.uniform(0.0, HOLD_S))
                    worker.kill()
                    worker.start()
                done.set()
                ended = [each for some in await asyncio.gather(*jobs) for each in some]
            finally:
                worker.kill()
                for job in jobs:
                    job.cancel()
                await asyncio.wait(jobs)
            ledger = (await http.get(f"{url}/ledger")).json()
        figures = _figures(ended, ledger, await _attempts(database, ended))
    await database.close()
    return {"kills": kills, "seed": seed, "wall_s": time.monotonic() - begun, **figures}


def worker_environment(address: str, database_url: str, data_dir: str) -> dict[str, str]:
    """Return the environment of a worker of these servers that finds the benchmarks' tools."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith("MUSTER_")}
    return ours | {
        "MUSTER_TEMPORAL_ADDRESS": address,
        "MUSTER_DATABASE_URL": database_url,
        "MUSTER_DATA_DIR": data_dir,
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
    }


@asynccontextmanager
async def _agents_and_model(client: Client, database: Database, model: str) -> AsyncIterator[None]:
    """Run an agent worker and an inference service whose model pays, in this process."""
    engine = SimulatedEngine(SimulatedConfig(time_scale=0.0), pay_then_answer)
    service = await simulated_service(engine, database, replica="bench")
    usual, option.HEARTBEAT_TIMEOUT = option.HEARTBEAT_TIMEOUT, LOST_AFTER
    stop = asyncio.Event()
    serving = asyncio.create_task(
        serve(client, service, model=model, stop=stop, settings=WorkerSettings(), identity="bench")
    )
    agents = Worker(
        client,
        task_queue=AGENTS_QUEUE,
        **workflow_options(),
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.close)
        try:
            async with agents:
                yield
        finally:
            option.HEARTBEAT_TIMEOUT = usual
            stop.set()
            await serving


async def _jobs_until(
    client: Client, model: str, done: asyncio.Event
) -> list[tuple[str, AgentJobResult]]:
    """Run one job after the other until `done`; return them all, ended."""
    jobs, ended = Jobs(client), list[tuple[str, AgentJobResult]]()
    while not done.is_set():
        job_id = await jobs.start(PAYER, "Pay all.", model=model)
        ended.append((job_id, await jobs.result(job_id)))
    return ended


async def _until_charged(
    http: httpx.AsyncClient, url: str, before: int, jobs: list[asyncio.Task[Any]]
) -> int:
    """Wait for a charge under a new key, whose answer is held back now; return how many there are.

    Not any charge: a call that is cut off again and again ends, as what kills its workers.
    """
    async with asyncio.timeout(CHARGED_TIMEOUT_S):
        while True:
            ledger = (await http.get(f"{url}/ledger")).json()
            if ledger["charges"] > before and ledger["held"]:
                return int(ledger["charges"])
            for job in jobs:
                if job.done():
                    job.result()  # jobs end only when they are told to: it failed
            await asyncio.sleep(0.01)


async def _attempts(
    database: Database, ended: list[tuple[str, AgentJobResult]]
) -> list[tuple[str, str]]:
    """Return call id and outcome of every attempt at these jobs' calls."""
    table = tool_ledger.c
    query = sa.select(table.call_id, table.outcome).where(
        table.job_id.in_([job_id for job_id, _ in ended])
    )
    return [(row.call_id, row.outcome) for row in await database.fetch(query, {})]


def _figures(
    ended: list[tuple[str, AgentJobResult]],
    ledger: dict[str, Any],
    attempts: list[tuple[str, str]],
) -> dict[str, Any]:
    calls = {call_id for call_id, _ in attempts}
    right = f"{TURNS * PARALLEL} payments"
    amounts = sorted(amount_of(1 + n // PARALLEL, n % PARALLEL) for n in range(TURNS * PARALLEL))
    outcomes = [outcome for _, outcome in attempts]

    def paid(job_id: str) -> list[int]:
        keys = ledger["charged"].items()
        return sorted(amount for key, amount in keys if key.startswith(f"{job_id}/"))

    count: Callable[[str], int] = outcomes.count
    return {
        "jobs": len(ended),
        "jobs_right": sum(r.answer == right and paid(job_id) == amounts for job_id, r in ended),
        "calls": len(calls),
        "keys": len(ledger["charged"]),
        "keys_are_the_calls": calls == set(ledger["charged"]),
        "charges": ledger["charges"],
        "asked": sum(ledger["asked"].values()),
        "asked_again": sum(times - 1 for times in ledger["asked"].values()),
        "attempts_lost": count("abandoned"),
        "attempts_finished": count("finished"),
    }


def is_right(figures: dict[str, Any]) -> bool:
    """Say whether each call was charged once, whatever was killed, and every job ended right."""
    return bool(
        figures["jobs"] == figures["jobs_right"]
        and figures["keys_are_the_calls"]
        and figures["charges"] == figures["calls"] == figures["attempts_finished"]
        and figures["calls"] == TURNS * PARALLEL * figures["jobs"]
    )


def main() -> int:
    """Run the benchmark from the command line; the status says whether all was right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the times at which it is killed")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    with embedded_stack(only="temporal,postgres") as stack:
        figures = asyncio.run(
            measure(stack.temporal_address, stack.database_url, given.kills, given.seed)
        )
    for name, value in figures.items():
        print(f"{name:<20}{value:>12,}" if isinstance(value, int) else f"{name:<20}{value:12.1f}")
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if is_right(figures) else 1


if __name__ == "__main__":
    way_out.run(main)
