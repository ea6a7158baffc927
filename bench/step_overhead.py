"""What one durable LLM step costs beyond the engine, and how many a second the stack does.

`python -m bench.step_overhead [--json FILE]` starts an embedded stack with the simulated engine,
which takes no time, so that everything measured is overhead: Temporal, PostgreSQL, our Python.

Two runs. Alone: one job takes steps one after the other; a step's overhead is the time from its
scheduling to its completion by the server's clock, less the engine's own. Together: many jobs at
once; CPU time by process says which part bounds the rate.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import uvloop
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import Worker

from bench.stack import BenchStack, embedded_stack
from bench.step_chain import StepChain, StepChainInput
from contracts.llm_step import FinishReason, LLMStepInput, LLMStepResult, Outcome, StepTiming, Usage
from contracts.message import ContextRef, Message, Role, content_hash, node_hash
from muster import exit as way_out
from muster.connection import connect_to
from store.database import Database
from store.step_ledger import Claimed, StepLedger, TokenRun

MODEL = "simulated"
QUEUE = "bench"


async def measure(stack: BenchStack, *, alone: int, jobs: int, steps: int) -> dict[str, Any]:
    """Return all figures of one stack."""
    client = await connect_to(stack.temporal_address)
    async with Worker(client, task_queue=QUEUE, workflows=[StepChain]):
        await _run_chain(client, 20)
        figures = await _alone(client, alone)
        figures |= await _together(client, stack, jobs, steps)
    figures |= await _postgres(stack)
    return figures


async def _run_chain(client: Client, steps: int) -> WorkflowHandle[StepChain, None]:
    handle = await client.start_workflow(
        StepChain.run,
        StepChainInput(model=MODEL, steps=steps),
        id=f"bench-{uuid4().hex}",
        task_queue=QUEUE,
    )
    await handle.result()
    return handle


async def _alone(client: Client, steps: int) -> dict[str, Any]:
    """Steps one after the other, nothing else on the stack."""
    handle = await _run_chain(client, steps)
    spans, inside, scheduled = [], [], []
    times: dict[int, float] = {}
    async for event in handle.fetch_history_events():
        at_ms = event.event_time.ToNanoseconds() / 1e6
        if event.HasField("activity_task_scheduled_event_attributes"):
            times[event.event_id] = at_ms
            scheduled.append(at_ms)
        elif event.HasField("activity_task_completed_event_attributes"):
            done = event.activity_task_completed_event_attributes
            (result,) = await client.data_converter.decode(done.result.payloads, [LLMStepResult])
            timing: StepTiming = result.timing
            engine_ms = 1e3 * (timing.engine_queue_s + timing.prefill_s + timing.decode_s)
            spans.append(at_ms - times[done.scheduled_event_id] - engine_ms)
            inside.append(1e3 * timing.total_s - engine_ms)
    periods = [b - a for a, b in itertools.pairwise(scheduled)]
    return {
        "overhead_ms_p50": statistics.median(spans),
        "overhead_ms_p95": statistics.quantiles(spans, n=20)[-1],
        "service_ms_p50": statistics.median(inside),
        "temporal_ms_p50": statistics.median(s - i for s, i in zip(spans, inside, strict=True)),
        "step_period_ms_p50": statistics.median(periods),
        "steps_alone": steps,
    }


async def _together(client: Client, stack: BenchStack, jobs: int, steps: int) -> dict[str, Any]:
    """Many jobs at once; the rate over the whole time, its ends included."""
    own = psutil.Process()
    before, own_before = stack.cpu_s(), sum(own.cpu_times()[:2])
    begun = time.perf_counter()
    await asyncio.gather(*(_run_chain(client, steps) for _ in range(jobs)))
    wall_s = time.perf_counter() - begun
    total = jobs * steps
    used = {name: cpu - before[name] for name, cpu in stack.cpu_s().items()}
    used["agents"] = sum(own.cpu_times()[:2]) - own_before
    return {
        "steps_per_s": total / wall_s,
        "jobs": jobs,
        "steps_per_job": steps,
        "cpu_ms_per_step": {name: 1e3 * cpu / total for name, cpu in sorted(used.items())},
        "cpu_cores_used": sum(used.values()) / wall_s,
    }


async def _postgres(stack: BenchStack, steps: int = 200) -> dict[str, Any]:
    """The ledger's two transactions alone, in sequence."""
    database = Database(stack.database_url)
    ledger = StepLedger(database)
    claims, commits = [], []
    for _ in range(steps):
        job_id = f"bench-{uuid4().hex}"
        step = LLMStepInput(
            step_id=f"{job_id}/bench/0",
            job_id=job_id,
            model=MODEL,
            base=None,
            append=(Message(role=Role.USER, content="Message number 0."),),
        )
        begun = time.perf_counter()
        claim = await ledger.claim(
            step=step, digest=content_hash(step), replica="bench", task_token=b"none"
        )
        claims.append(time.perf_counter() - begun)
        assert isinstance(claim, Claimed)
        answer = Message(role=Role.ASSISTANT, content="An answer.")
        head = node_hash(node_hash(None, step.append[0]), answer)
        result = LLMStepResult(
            step_id=step.step_id,
            outcome=Outcome.FINISHED,
            context=ContextRef(head=head, token_run=step.step_id),
            message=answer,
            finish_reason=FinishReason.STOP,
            usage=Usage(prompt_tokens=50, completion_tokens=16),
            timing=StepTiming(),
            replica="bench",
            epoch=claim.epoch,
        )
        run = TokenRun(step.step_id, None, "bench", list(range(66)))
        begun = time.perf_counter()
        assert await ledger.commit(result, parent=None, append=(*step.append, answer), run=run)
        commits.append(time.perf_counter() - begun)
    await database.close()
    return {
        "claim_ms_p50": 1e3 * statistics.median(claims),
        "commit_ms_p50": 1e3 * statistics.median(commits),
    }


def _print(figures: dict[str, Any]) -> None:
    print(f"a lone step, beyond the engine   {figures['overhead_ms_p50']:7.1f} ms at the median")
    print(f"  Temporal and its workers       {figures['temporal_ms_p50']:7.1f} ms")
    print(f"  the service                    {figures['service_ms_p50']:7.1f} ms")
    print(f"    of it PostgreSQL: claim      {figures['claim_ms_p50']:7.1f} ms")
    print(f"                      commit     {figures['commit_ms_p50']:7.1f} ms")
    print(f"from step to step of one job     {figures['step_period_ms_p50']:7.1f} ms")
    print(f"many jobs at once                {figures['steps_per_s']:7.1f} steps/s")
    for name, cpu_ms in figures["cpu_ms_per_step"].items():
        print(f"  CPU of {name:<24}{cpu_ms:7.2f} ms a step")


def main() -> int:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--alone", type=int, default=200, help="steps of the lone job")
    parser.add_argument("--jobs", type=int, default=40, help="jobs at once")
    parser.add_argument("--steps", type=int, default=50, help="steps of each of them")
    arguments = parser.parse_args()
    with embedded_stack(engine="simulated", simulated_time_scale="0", model_name=MODEL) as stack:
        figures = uvloop.run(
            measure(stack, alone=arguments.alone, jobs=arguments.jobs, steps=arguments.steps)
        )
    _print(figures)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    way_out.run(main)
