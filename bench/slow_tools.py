"""Many slow asynchronous tool calls at once on one tool worker: memory, heartbeats, other jobs.

`python -m bench.slow_tools [--calls 1000] [--seconds 30] [--json FILE]` starts an embedded stack
whose tool worker may run that many calls, and jobs that make them all at once, 25 a job. Beside
them a lone job takes LLM steps one after the other, before and meanwhile: the ratio of its median
step is what the calls cost others. The model is scripted and takes no time. Heartbeats are counted
on the server, each second, by the times that it notes for the calls that run; so two of one call
within a second count as one. It is done three times; but for memory, figures are of the last.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import uvloop
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import Worker

from bench.stack import BenchStack, embedded_stack, simulated_service
from bench.step_chain import StepChain, StepChainInput
from contracts.agent import AgentSpec, Limits, ToolRef
from contracts.job import StopReason
from contracts.name import CALL_TOOL, LLM_STEP
from inference_service.engine.protocol import EngineRequest
from inference_service.engine.simulated import SimulatedConfig, SimulatedEngine
from inference_service.worker import WorkerSettings, serve
from muster import exit as way_out
from muster.connection import connect_to
from muster.job import Jobs
from store.database import Database

MODEL, QUEUE = "slow-tools", "bench-slow-tools"
PER_JOB = 25
CHAIN_STEPS = 40
"""Of each of the lone jobs: a conversation that stays short."""

WAVES = 3
"""How often all calls are made at once: memory that grows from wave to wave is a leak."""

START_LIMIT_S = 120.0
"""The longest wait for all calls to run."""

Handle = WorkflowHandle[Any, Any]


def model_of(seconds: float) -> Any:
    """Return the model: jobs with tools call them all, then answer."""

    def respond(request: EngineRequest, _prompt: str) -> str:
        step_id = request.request_id.split("#")[0]
        if "bench" in step_id or not step_id.endswith("/1"):
            return json.dumps({"answer": "Done."}) if "bench" not in step_id else "Done."
        call = {"tool": "wait", "arguments": {"seconds": seconds}}
        return json.dumps({"calls": [call] * PER_JOB})

    return respond


async def measure(stack: BenchStack, calls: int, seconds: float) -> dict[str, Any]:
    """Return all figures of one stack."""
    client, database = await connect_to(stack.temporal_address), Database(stack.database_url)
    engine = SimulatedEngine(SimulatedConfig(time_scale=0.0, num_blocks=200_000), model_of(seconds))
    service = await simulated_service(engine, database, replica="bench")
    stop, settings = asyncio.Event(), WorkerSettings()
    serving = asyncio.create_task(
        serve(client, service, model=MODEL, stop=stop, settings=settings, identity="bench")
    )
    try:
        async with Worker(client, task_queue=QUEUE, workflows=[StepChain]):
            return await _measure(client, stack, calls, seconds)
    finally:
        stop.set()
        await serving
        await engine.close()
        await database.close()


async def _measure(client: Client, stack: BenchStack, calls: int, seconds: float) -> dict[str, Any]:
    done = asyncio.Event()
    chaining = asyncio.create_task(_chains(client, done))
    await asyncio.sleep(10.0)
    rss = {"before": stack.rss_mb("tools")}
    first = time.time()
    wave = 0
    while True:
        wave += 1
        begun, started = time.time(), time.monotonic()
        jobs = await _start_jobs(client, calls, seconds)
        at_once, all_run, beats, peak = await _watch(client, stack, jobs, calls)
        ended = [await job.result() for job in jobs]
        wall_s, until = time.monotonic() - started, time.time()
        rss |= {f"wave {wave}": peak, f"after wave {wave}": stack.rss_mb("tools")}
        if wave == WAVES:
            break
    done.set()
    steps = [step for chain in await chaining for step in await _steps(chain)]
    before = [took for at, took in steps if at < first]
    meanwhile = [took for at, took in steps if all_run[0] < at < all_run[1]]
    return {
        "calls": calls,
        "seconds": seconds,
        "calls_at_once": at_once,
        "wall_s": wall_s,
        "jobs_answered": sum(each["stop_reason"] == StopReason.ANSWERED for each in ended),
        "jobs": len(jobs),
        "attempts": await _attempts(jobs),
        "heartbeats_per_s": sum(beats) / max(1, len(beats)),
        "heartbeats_per_s_max": max(beats, default=0),
        "tools_rss_mb": rss,
        "step_ms_before": 1e3 * statistics.median(before),
        "step_ms_meanwhile": 1e3 * statistics.median(meanwhile),
        "step_ratio": statistics.median(meanwhile) / statistics.median(before),
        "steps_meanwhile": len(meanwhile),
        "step_ms_p95_start_to_end": 1e3
        * statistics.quantiles([took for at, took in steps if begun < at < until], n=20)[-1],
    }


async def _chains(client: Client, done: asyncio.Event) -> list[Handle]:
    """Let one lone job after the other take LLM steps until `done`."""
    chains: list[Handle] = []
    while not done.is_set():
        handle = await client.start_workflow(
            StepChain.run,
            StepChainInput(model=MODEL, steps=CHAIN_STEPS),
            id=f"bench-{uuid4().hex}",
            task_queue=QUEUE,
        )
        chains.append(handle)
        await handle.result()
    return chains


async def _start_jobs(client: Client, calls: int, seconds: float) -> list[Handle]:
    tool = ToolRef(function="bench.slow_tool:wait", timeout=timedelta(seconds=seconds + 60))
    agent = AgentSpec(
        name="waiter",
        instructions="Wait.",
        tools=(tool,),
        max_parallel_tool_calls=PER_JOB,
        limits=Limits(max_tool_calls=PER_JOB),
    )
    agent = agent.model_copy(
        update={"sampling": agent.sampling.model_copy(update={"max_tokens": 8_192})}
    )
    jobs = Jobs(client)
    ids = [await jobs.start(agent, "Wait.", model=MODEL) for _ in range(calls // PER_JOB)]
    return [client.get_workflow_handle(job_id) for job_id in ids]


async def _watch(
    client: Client, stack: BenchStack, jobs: list[Handle], calls: int
) -> tuple[int, tuple[float, float], list[int], float]:
    """Look at all running calls each second until none runs any more.

    Return the most calls that ran at once, from when until when, how many heartbeats the server
    noted in each second in between, and the tool worker's greatest memory in MB.
    """
    at_once, first, last, peak = 0, 0.0, 0.0, 0.0
    beats: list[int] = []
    seen: dict[str, int] = {}
    limit = time.monotonic() + START_LIMIT_S
    while True:
        begun = time.monotonic()
        described = await asyncio.gather(*(job.describe() for job in jobs))
        running: dict[str, int] = {}
        for each in described:
            for call in each.raw_description.pending_activities:
                if call.activity_type.name == CALL_TOOL and call.HasField("last_started_time"):
                    key = f"{each.id}/{call.activity_id}"
                    running[key] = call.last_heartbeat_time.ToNanoseconds()
        peak = max(peak, stack.rss_mb("tools"))
        at_once = max(at_once, len(running))
        if len(running) >= calls * 0.99:
            first, last = first or time.time(), time.time()
            beats.append(sum(seen.get(key, 0) != at for key, at in running.items() if at))
        seen = running
        if at_once and not running:
            return at_once, (first, last), beats[1:], peak
        if time.monotonic() > limit + START_LIMIT_S:
            raise TimeoutError(f"{len(running)} calls still run, of {at_once} at once")
        await asyncio.sleep(max(0.0, 1.0 - (time.monotonic() - begun)))


async def _steps(chain: Handle) -> list[tuple[float, float]]:
    """Return when each LLM step of the lone job was scheduled, and how long it took, in seconds."""
    scheduled: dict[int, float] = {}
    found = list[tuple[float, float]]()
    async for event in chain.fetch_history_events():
        at = event.event_time.ToNanoseconds() / 1e9
        if event.HasField("activity_task_scheduled_event_attributes"):
            if event.activity_task_scheduled_event_attributes.activity_type.name == LLM_STEP:
                scheduled[event.event_id] = at
        elif event.HasField("activity_task_completed_event_attributes"):
            begun = event.activity_task_completed_event_attributes.scheduled_event_id
            found.append((scheduled[begun], at - scheduled[begun]))
    return found


async def _attempts(jobs: list[Handle]) -> dict[str, int]:
    """Return how many activities of these jobs had how many attempts."""
    events = await asyncio.gather(*(job.fetch_history() for job in jobs))
    attempts: Counter[int] = Counter()
    for event in itertools.chain.from_iterable(each.events for each in events):
        if event.HasField("activity_task_started_event_attributes"):
            attempts[event.activity_task_started_event_attributes.attempt] += 1
    return {str(number): count for number, count in sorted(attempts.items())}


def main() -> int:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1_000, help="a multiple of 25")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long each call takes")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    with embedded_stack(
        only="temporal,postgres,agents,tools",
        engine="simulated",
        max_tool_calls=str(given.calls),
        tool_path=str(Path(__file__).resolve().parents[1]),
    ) as stack:
        figures = uvloop.run(measure(stack, given.calls, given.seconds))
    for name, value in figures.items():
        print(f"{name:<28}{value:.1f}" if isinstance(value, float) else f"{name:<28}{value}")
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    way_out.run(main)
