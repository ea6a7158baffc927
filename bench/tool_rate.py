"""The rate of a tool group, over two tool workers: how many calls does the server hand out?

`python -m bench.tool_rate [--rate 5] [--seconds 60] [--partitions 4] [--json FILE]` starts two
`muster worker tools` processes that serve one group with that rate, and jobs that want more calls
of it at once than may run in that time. Starts are counted by the server's own event times. The
rate is that of the seconds after the first burst, and must be within 10% of what was asked for.
`--partitions` is for servers that are not embedded: Temporal's default is 4 for each task queue.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from temporalio.client import Client, WorkflowHandle
from temporalio.worker import Worker

from bench.stack import embedded_stack, simulated_service
from bench.tool_kill import ToolWorker, worker_environment
from contracts.agent import AgentSpec, Limits, Sampling, ToolRef
from contracts.job import StopReason
from contracts.name import AGENTS_QUEUE, CALL_TOOL, tool_queue
from inference_service.engine.protocol import EngineRequest
from inference_service.engine.simulated import SimulatedConfig, SimulatedEngine
from inference_service.worker import WorkerSettings, serve
from muster import exit as way_out
from muster.connection import connect_to
from muster.job import Jobs
from muster.stack.namespace import prepare_namespace
from muster.stack.part import start_part
from muster.stack.port import free_port
from muster.stack.process import Command
from muster.stack.queue import ACTIVITY, pollers
from muster.stack.temporal import TemporalPart
from store.database import Database
from workflows.worker import workflow_options

WORKERS = 2
PER_JOB = 25
SETTLE_S = 5.0
"""After the first start: the burst is over then."""

BURST_S = 4.0
"""Calls beside those of the measured time, in seconds of the rate: enough for any burst seen."""

TOLERANCE = 0.1

START_LIMIT_S = 60.0
"""The longest wait for the workers to poll."""

Handle = WorkflowHandle[Any, Any]


def respond(request: EngineRequest, _prompt: str) -> str:
    """Answer as the model: ask for all calls at once, then be done."""
    if not request.request_id.split("#")[0].endswith("/1"):
        return json.dumps({"answer": "Done."})
    call = {"tool": "wait", "arguments": {"seconds": 0.0}}
    return json.dumps({"calls": [call] * PER_JOB})


async def measure(address: str, database_url: str, rate: float, seconds: float) -> dict[str, Any]:
    """Return the figures of one run, on a group of its own."""
    group, model = f"g{uuid4().hex[:8]}", f"rate-{uuid4().hex[:8]}"
    client, database = await connect_to(address), Database(database_url)
    with tempfile.TemporaryDirectory() as data_dir:
        environment = worker_environment(address, database_url, data_dir)
        environment["MUSTER_TOOL_GROUPS"] = f"{group}={rate:g}/s"
        workers = [ToolWorker(environment) for _ in range(WORKERS)]
        try:
            for worker in workers:
                worker.start()
            async with _agents_and_model(client, database, model):
                await _until_polled(client, tool_queue(group))
                count = math.ceil(rate * (seconds + SETTLE_S + BURST_S) / PER_JOB)
                jobs = await _start(client, group, model, count)
                ended = [await job.result() for job in jobs]
        finally:
            for worker in workers:
                worker.kill()
            await database.close()
    starts = sorted([start for job in jobs for start in await _starts(job)])
    answered = sum(each["stop_reason"] == StopReason.ANSWERED for each in ended)
    return {"rate": rate, "jobs": len(jobs), "jobs_answered": answered} | figures(starts, seconds)


def figures(starts: list[tuple[float, str]], seconds: float) -> dict[str, Any]:
    """Return what starts, as time in seconds and worker, in order, say of the rate."""
    times = [at for at, _ in starts]
    first = times[0]

    def between(begin: float, end: float) -> int:
        return sum(first + begin <= at < first + end for at in times)

    slices = [between(SETTLE_S + at, SETTLE_S + at + 10) for at in range(0, int(seconds) - 9, 10)]
    return {
        "calls": len(times),
        "whole_s": times[-1] - first,
        "first_second": between(0, 1),
        "until_settled": between(0, SETTLE_S),
        "seconds": seconds,
        "per_s": between(SETTLE_S, SETTLE_S + seconds) / seconds,
        "per_s_of_each_10_s": [each / 10 for each in slices],
        "of_each_worker": sorted(Counter(worker for _, worker in starts).values()),
    }


def is_right(found: dict[str, Any]) -> bool:
    """Say whether the rate was kept, all workers had a share, and every job ended right."""
    return bool(
        abs(found["per_s"] / found["rate"] - 1) <= TOLERANCE
        and len(found["of_each_worker"]) == WORKERS
        and found["jobs_answered"] == found["jobs"]
    )


@asynccontextmanager
async def _agents_and_model(client: Client, database: Database, model: str) -> AsyncIterator[None]:
    engine = SimulatedEngine(SimulatedConfig(time_scale=0.0), respond)
    service = await simulated_service(engine, database, replica="bench")
    stop = asyncio.Event()
    serving = asyncio.create_task(
        serve(client, service, model=model, stop=stop, settings=WorkerSettings(), identity="bench")
    )
    try:
        async with Worker(client, task_queue=AGENTS_QUEUE, **workflow_options()):
            yield
    finally:
        stop.set()
        await serving
        await engine.close()


async def _until_polled(client: Client, queue: str) -> None:
    async with asyncio.timeout(START_LIMIT_S):
        while len(await pollers(client, queue, ACTIVITY)) < WORKERS:
            pass  # each look is a call to the server


async def _start(client: Client, group: str, model: str, count: int) -> list[Handle]:
    agent = AgentSpec(
        name="waiter",
        instructions="Wait.",
        tools=(ToolRef(function="bench.slow_tool:wait", group=group),),
        max_parallel_tool_calls=PER_JOB,
        sampling=Sampling(max_tokens=8_192),
        limits=Limits(max_tool_calls=PER_JOB),
    )
    jobs = Jobs(client)
    ids = [await jobs.start(agent, "Wait.", model=model) for _ in range(count)]
    return [client.get_workflow_handle(job_id) for job_id in ids]


async def _starts(job: Handle) -> list[tuple[float, str]]:
    """Return when, in seconds, and by which worker each tool call of a job was started."""
    calls = set[int]()
    found = list[tuple[float, str]]()
    async for event in job.fetch_history_events():
        if event.HasField("activity_task_scheduled_event_attributes"):
            if event.activity_task_scheduled_event_attributes.activity_type.name == CALL_TOOL:
                calls.add(event.event_id)
        elif event.HasField("activity_task_started_event_attributes"):
            started = event.activity_task_started_event_attributes
            if started.scheduled_event_id in calls:
                found.append((event.event_time.ToNanoseconds() / 1e9, started.identity))
    return found


class PartitionedTemporal(TemporalPart):
    """A server whose task queues have that many partitions, as one that is not embedded has."""

    partitions = 1

    def command(self) -> Command:
        """Return how to start it."""
        command = super().command()
        argv = [
            f"{word.rpartition('=')[0]}={self.partitions}"
            if word.startswith("matching.numTaskqueue")
            else word
            for word in command.argv
        ]
        return replace(command, argv=argv)


async def _on_partitions(
    database_url: str, rate: float, seconds: float, partitions: int
) -> dict[str, Any]:
    """Measure on a server of its own."""
    part = PartitionedTemporal(port=free_port(), ui_port=None, namespace="default", directory=None)
    PartitionedTemporal.partitions = partitions
    with tempfile.TemporaryDirectory() as log_dir:
        server = await start_part(part, Path(log_dir) / "temporal.log", START_LIMIT_S)
        try:
            await prepare_namespace(await part.connect())
            return await measure(part.address, database_url, rate, seconds)
        finally:
            await server.stop()


def main() -> int:
    """Run the benchmark from the command line; the status says whether the rate was kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=5.0, help="calls a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="measured after the burst")
    parser.add_argument("--partitions", type=int, default=1, help="of each task queue")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    begun = time.monotonic()
    with embedded_stack(only="postgres") as stack:
        found = asyncio.run(
            _on_partitions(stack.database_url, given.rate, given.seconds, given.partitions)
        )
    found |= {"partitions": given.partitions, "wall_s": time.monotonic() - begun}
    for name, value in found.items():
        print(f"{name:<20}{value:.2f}" if isinstance(value, float) else f"{name:<20}{value}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if is_right(found) else 1


if __name__ == "__main__":
    way_out.run(main)
