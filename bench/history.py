"""What one long job puts into its Temporal history, turn by turn, and what its processes hold.

`python -m bench.history [--calls 100] [--tool-kb 5] [--context-tokens 200000] [--json FILE]` starts
an embedded stack and runs one job: an input of that many tokens (4.5 bytes each, the usual figure
for English prose), then that many tool calls of that size, one in each turn, then an answer. The
engine is simulated, and counts every byte as a token. Sizes are those of the events as the server
sends them, over all runs of the job; a turn reaches from one LLM step's scheduling to the next's.

`--whole` runs beside it an agent as durable engines run it today: each model call's input is the
whole conversation. `--turns N` is another shape: N turns with short results and a short input.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import uvloop
from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import (
    Client,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowHistory,
    WorkflowQueryFailedError,
)
from temporalio.service import RPCError
from temporalio.worker import Worker

from bench.stack import BenchStack, embedded_stack
from bench.whole_conversation import WholeConversation, WholeInput, call_model, read_page
from contracts.agent import AgentSpec, Limits, ToolRef
from contracts.error import UnavailableError
from contracts.job import JobProgress, StopReason
from contracts.name import LLM_STEP, PROGRESS_QUERY
from muster import exit as way_out
from muster.connection import connect_to
from muster.job import Jobs

MODEL = "scripted"
QUEUE = "bench-whole"
BYTES_PER_TOKEN = 4.5
WINDOW = 2
"""Turns on each side of the named one that its figure is the mean of."""

MIN_TURNS = 50
"""With fewer, the window around the 10th of a hundred holds the opening."""

AT = (100, 1_000, 3_000)
"""Turns at which resident memory is told."""

GIVE_UP = timedelta(minutes=10)
STUCK = timedelta(seconds=30)
"""A workflow task that fails and is retried for this long is given up."""


@dataclass(frozen=True, slots=True)
class Held:
    """Resident memory of the agent worker and the service after so many turns, in MB."""

    turn: int
    agents_mb: float
    service_mb: float


def opening_text(context_tokens: int) -> str:
    """Return a made-up text of about that many tokens."""
    letters = random.Random(0)
    words = (
        "".join(letters.choices("etaoinshrdlu", k=letters.randint(2, 7))) for _ in iter(int, 1)
    )
    size, text = int(context_tokens * BYTES_PER_TOKEN), ""
    parts: list[str] = []
    while len(text) < size:
        parts.append(next(words))
        if len(parts) == 10_000 or len(text) + sum(map(len, parts)) + len(parts) >= size:
            text += " ".join(parts) + " "
            parts.clear()
    return text[:size]


@contextmanager
def scripted_service(
    stack: BenchStack, calls: int, tool_bytes: int, longest: int
) -> Iterator[psutil.Process]:
    """Serve `MODEL` in a process of its own."""
    numbers = map(str, (calls, tool_bytes, longest))
    program = [sys.executable, "-m", "bench.scripted_service"]
    command = [*program, stack.temporal_address, stack.database_url, MODEL, *numbers]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise UnavailableError("the scripted service did not come up")
            yield psutil.Process(process.pid)
        finally:
            process.terminate()


async def measure(stack: BenchStack, given: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of the job, and of its counterpart if asked for."""
    client = await connect_to(stack.temporal_address)
    text = opening_text(given.context_tokens)
    tool_bytes = int(given.tool_kb * 1_000)
    longest = len(text) + (given.calls + 2) * (tool_bytes + 500) + 10_000
    with scripted_service(stack, given.calls, tool_bytes, longest) as service:
        figures = await _muster(client, stack, service, text, given.calls)
    figures |= {key: getattr(given, key) for key in ("calls", "tool_kb", "context_tokens")}
    if given.whole:
        whole = WholeInput(text=text, calls=given.calls, tool_bytes=tool_bytes)
        figures["whole"] = await _whole(client, whole)
    return figures


async def _muster(
    client: Client, stack: BenchStack, service: psutil.Process, text: str, calls: int
) -> dict[str, Any]:
    jobs, held = Jobs(client), [Held(0, stack.rss_mb("agents"), _rss_mb(service))]
    agent = AgentSpec(
        name="reader",
        instructions="Read page after page, then answer.",
        tools=(ToolRef(function="page:page"),),
        limits=Limits(max_turns=min(calls + 2, 10_000), max_tokens=10**12, max_tool_calls=10_000),
    )
    begun = time.monotonic()
    job_id = await jobs.start(agent, text, model=MODEL)
    job = client.get_workflow_handle(job_id)
    ended = asyncio.create_task(job.result())
    while not ended.done():
        await asyncio.wait({ended}, timeout=1.0)
        turns_done = await _turns_of(job) or held[-1].turn
        held.append(Held(turns_done, stack.rss_mb("agents"), _rss_mb(service)))
    try:
        held.append(Held(ended.result()["turns"], stack.rss_mb("agents"), _rss_mb(service)))
        completed = ended.result()["stop_reason"] == StopReason.ANSWERED
        failure = None if completed else str(ended.result()["stop_reason"])
    except WorkflowFailureError as error:
        completed, failure = False, str(error.cause)
    runs = [list(history.events) for history in await histories(client, job_id)]
    turns = [size for run in runs for size in turn_bytes(run)]
    return {
        "completed": completed,
        "failure": failure,
        "wall_s": time.monotonic() - begun,
        "runs": len(runs),
        "events": sum(map(len, runs)),
        "history_mb": sum(event.ByteSize() for run in runs for event in run) / 1e6,
        "turns": len(turns),
        **at_10_and_90(turns),
        "agents_rss_mb": growth([(each.turn, each.agents_mb) for each in held]),
        "service_rss_mb": growth([(each.turn, each.service_mb) for each in held]),
    }


def _rss_mb(process: psutil.Process) -> float:
    return process.memory_info().rss / 1e6


async def _turns_of(job: WorkflowHandle[Any, Any]) -> int:
    """Return the turns that a job has taken; 0 if it does not say."""
    try:
        progress: JobProgress = await job.query(
            PROGRESS_QUERY, result_type=JobProgress, rpc_timeout=timedelta(seconds=2)
        )
    except (RPCError, WorkflowQueryFailedError):
        return 0
    return progress.turns


def growth(held: list[tuple[int, float]]) -> dict[str, float]:
    """Return resident memory before, by the `AT` turns, at the end and at its peak, in MB.

    `held` has turns and memory, in the order of time.
    """
    last = held[-1][0]
    marks = {f"turn_{turn}": turn for turn in AT if turn <= last}
    return {
        "before": held[0][1],
        **{name: next(mb for turn, mb in held if turn >= at) for name, at in marks.items()},
        "half": held[len(held) // 2][1],
        "after": held[-1][1],
        "peak": max(mb for _, mb in held),
    }


async def histories(client: Client, job_id: str) -> list[WorkflowHistory]:
    """Return the histories of all runs of a workflow, oldest first."""
    described = (await client.get_workflow_handle(job_id).describe()).raw_description
    next_run: str = described.workflow_execution_info.first_run_id
    runs: list[WorkflowHistory] = []
    while next_run:
        handle = client.get_workflow_handle(job_id, run_id=next_run)
        runs.append(await handle.fetch_history())
        last = runs[-1].events[-1].workflow_execution_continued_as_new_event_attributes
        next_run = last.new_execution_run_id
    return runs


def turn_bytes(events: list[HistoryEvent]) -> list[int]:
    """Return the size of each whole turn of one run, in bytes."""
    turns: list[int] = []
    for event in events:
        scheduled = event.activity_task_scheduled_event_attributes
        if scheduled.activity_type.name == LLM_STEP:
            turns.append(0)
        if turns:
            turns[-1] += event.ByteSize()
    return turns[:-1]


def at_10_and_90(turns: list[int]) -> dict[str, float]:
    """Return the mean bytes of turns around the 10th and the 90th of a hundred."""
    if len(turns) < MIN_TURNS:
        return {}
    means = []
    for share in (0.1, 0.9):
        middle = round(share * len(turns))
        means.append(statistics.mean(turns[middle - WINDOW - 1 : middle + WINDOW]))
    return {
        "bytes_per_turn_at_10": means[0],
        "bytes_per_turn_at_90": means[1],
        "bytes_per_turn_ratio": means[1] / means[0],
    }


async def _whole(client: Client, given: WholeInput) -> dict[str, Any]:
    """Run the counterpart until it ends, the server ends it, or its workflow task is stuck."""
    async with Worker(
        client,
        task_queue=QUEUE,
        workflows=[WholeConversation],
        activities=[call_model, read_page],
    ):
        job = await client.start_workflow(
            WholeConversation.run, given, id=f"bench-whole-{uuid4().hex}", task_queue=QUEUE
        )
        seen, moved = 0, time.monotonic()
        until = moved + GIVE_UP.total_seconds()
        while True:
            await asyncio.sleep(1.0)
            status = await job.describe()
            if status.history_length != seen:
                seen, moved = status.history_length, time.monotonic()
            if status.status is not WorkflowExecutionStatus.RUNNING:
                break
            if time.monotonic() > min(until, moved + STUCK.total_seconds()):
                await job.terminate("it makes no progress")
                break
        (history,) = await histories(client, job.id)
    return _whole_figures(list(history.events), given.calls)


def _whole_figures(events: list[HistoryEvent], calls: int) -> dict[str, Any]:
    last = events[-1]
    ended_by = last.WhichOneof("attributes") or ""
    made = sum(
        event.activity_task_scheduled_event_attributes.activity_type.name == "call_model"
        for event in events
    )
    completed = ended_by == "workflow_execution_completed_event_attributes"
    terminated = last.workflow_execution_terminated_event_attributes
    return {
        "completed": completed,
        "ended_by": "" if completed else (terminated.reason or ended_by),
        "model_calls": made,
        "calls_wanted": calls,
        "history_mb": sum(event.ByteSize() for event in events) / 1e6,
    }


def _print(figures: dict[str, Any]) -> None:
    whole = figures.get("whole", {})

    def row(name: str, key: str, form: str = "{}") -> None:
        cells = [form.format(f[key]) if key in f else "" for f in (figures, whole)]
        print(f"{name:<34}{cells[0]:>16}{cells[1]:>22}")

    print(f"{'':34}{'muster':>16}{'whole conversation' if whole else '':>22}")
    row("completed", "completed")
    row("history, MB", "history_mb", "{:.2f}")
    row("turns", "turns")
    row("model calls before its end", "model_calls")
    row("runs", "runs")
    row("bytes of turn 10 of 100", "bytes_per_turn_at_10", "{:.0f}")
    row("bytes of turn 90 of 100", "bytes_per_turn_at_90", "{:.0f}")
    row("ratio", "bytes_per_turn_ratio", "{:.3f}")
    for name in ("agents", "service"):
        rss = figures[f"{name}_rss_mb"]
        told = ", ".join(f"{key.replace('_', ' ')} {mb:.0f}" for key, mb in rss.items())
        print(f"resident memory of {name}, MB: {told}")
    if whole.get("ended_by"):
        print(f"the whole conversation was ended by: {whole['ended_by']}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100, help="tool calls of the job")
    parser.add_argument("--tool-kb", type=float, default=5.0, help="size of a result, in kB")
    parser.add_argument("--context-tokens", type=int, default=200_000, help="size of the input")
    parser.add_argument("--turns", type=int, help="that many turns, short results, short input")
    parser.add_argument("--whole", action="store_true", help="run the counterpart as well")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    if given.turns:
        given.calls, given.tool_kb, given.context_tokens = given.turns - 1, 0.2, 1_000
    return given


def main() -> int:
    """Run the benchmark from the command line."""
    given = _arguments()
    tools = str(Path(__file__).parent / "tool")
    with embedded_stack(engine="simulated", simulated_time_scale="0", tool_path=tools) as stack:
        figures = uvloop.run(measure(stack, given))
    _print(figures)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    way_out.run(main)
