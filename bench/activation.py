"""How long the workflow thread works on one activation, where what a job handles is large.

`python -m bench.activation [--json FILE]` starts an embedded stack, and in this process an agent
worker whose sandbox is timed. One job after the other: a tool result of 4 MB, one of 30 MB (which
no context window here holds, so its job fails with one clear error), 100 kB of tool schemas, an
agent with 2,000 examples, and a conversation of 1,000 turns. Each job's histories are replayed
then, and timed too: that is what a worker does that takes a job over.

Times are CPU seconds of the workflow's thread; the SDK takes one that works for 2 s for dead.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import uvloop
from temporalio.client import Client, WorkflowFailureError
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import (
    Replayer,
    Worker,
    WorkflowInstance,
    WorkflowInstanceDetails,
    WorkflowRunner,
)

from bench.history import MODEL, histories, scripted_service
from bench.stack import BenchStack, embedded_stack
from contracts.agent import AgentSpec, Limits, ToolRef
from contracts.job import AgentJobInput, AgentJobResult
from contracts.limit import HARD_TOOL_RESULT_BYTES
from contracts.message import Message, Role
from contracts.name import AGENT_WORKFLOW
from muster import exit as way_out
from muster.connection import connect_to
from workflows.option import search_attributes
from workflows.worker import workflow_options, workflow_runner

QUEUE = "bench-activation"
LONGEST = 6_000_000
"""Context window of the simulated engine, in tokens (bytes)."""

SCHEMAS, SCHEMA_BYTES = 50, 2_000
EXAMPLES = 2_000
TURNS = 1_000


class TimedInstance:
    """One job in the sandbox, its activations timed."""

    def __init__(self, instance: WorkflowInstance, seconds: list[float]) -> None:
        self._instance, self._seconds = instance, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._instance, name)

    def activate(self, activation: Any) -> Any:
        """Activate the job on this thread."""
        begun = time.thread_time()
        try:
            return self._instance.activate(activation)
        finally:
            self._seconds.append(time.thread_time() - begun)


class TimedRunner(WorkflowRunner):
    """The sandbox that all our workflows run in; `seconds` has what each activation took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._runner = workflow_runner()

    def prepare_workflow(self, defn: Any) -> None:
        """Prepare a workflow for execution."""
        self._runner.prepare_workflow(defn)

    def create_instance(self, det: WorkflowInstanceDetails) -> WorkflowInstance:
        """Create a job in the sandbox."""
        made = TimedInstance(self._runner.create_instance(det), self.seconds)
        return cast(WorkflowInstance, made)


@dataclass(frozen=True, slots=True)
class Case:
    """A job: its agent, how many tool calls the model makes, and the size of a result in bytes."""

    agent: AgentSpec
    calls: int = 1
    tool_bytes: int = 200


def wide_tools(directory: Path) -> tuple[ToolRef, ...]:
    """Write a module of tools with long descriptions; return how an agent names them."""
    text = "word " * (SCHEMA_BYTES // 5)
    tools = [
        f'def wide{n}(n: int) -> int:\n    """{text}"""\n    return n\n' for n in range(SCHEMAS)
    ]
    (directory / "wide.py").write_text("\n\n".join(tools))
    return tuple(ToolRef(function=f"wide:wide{n}") for n in range(SCHEMAS))


def cases(directory: Path) -> Mapping[str, Case]:
    """Return all jobs, by name."""
    page = ToolRef(function="page:page", max_result_bytes=HARD_TOOL_RESULT_BYTES)
    agent = AgentSpec(
        name="reader",
        instructions="Read page after page, then answer.",
        tools=(page,),
        limits=Limits(max_turns=10_000, max_tokens=10**12, max_tool_calls=10_000),
    )
    roles = (Role.USER, Role.ASSISTANT)
    examples = tuple(Message(role=roles[n % 2], content=f"Example {n}.") for n in range(EXAMPLES))
    wide = agent.model_copy(update={"tools": (page, *wide_tools(directory))})
    return {
        "4 MB tool result": Case(agent, tool_bytes=4_000_000),
        "30 MB tool result": Case(agent, tool_bytes=30_000_000),
        "100 kB of tool schemas": Case(wide),
        "2,000 examples": Case(agent.model_copy(update={"examples": examples})),
        "1,000 turns": Case(agent, calls=TURNS),
    }


@dataclass(slots=True)
class Timed:
    """What became of one job: its error, if it failed, and the seconds of its activations."""

    failure: str | None = None
    history_mb: float = 0.0
    runs: int = 0
    live_s: list[float] = field(default_factory=list)
    replayed_s: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """Return the longest activations, and how the job went."""
        return {
            "failure": self.failure,
            "history_mb": self.history_mb,
            "runs": self.runs,
            "activations": len(self.live_s),
            "longest_s": max(self.live_s),
            "longest_replayed_s": max(self.replayed_s),
        }


async def take(client: Client, case: Case) -> Timed:
    """Run one job on a timed worker, then replay it."""
    runner, timed = TimedRunner(), Timed()
    job = AgentJobInput(agent=case.agent, input="Read.", model=MODEL)
    async with Worker(
        client,
        task_queue=QUEUE,
        **workflow_options(runner),
    ):
        handle = await client.start_workflow(
            AGENT_WORKFLOW,
            job,
            id=f"job-{uuid4()}",
            task_queue=QUEUE,
            result_type=AgentJobResult,
            search_attributes=search_attributes(job),
        )
        try:
            await handle.result()
        except WorkflowFailureError as error:
            timed.failure = str(error.cause)
    timed.live_s = runner.seconds
    again = TimedRunner()
    replayer = Replayer(**workflow_options(again), data_converter=pydantic_data_converter)
    for history in await histories(client, handle.id):
        timed.runs += 1
        timed.history_mb += sum(event.ByteSize() for event in history.events) / 1e6
        await replayer.replay_workflow(history)
    timed.replayed_s = again.seconds
    return timed


async def measure(stack: BenchStack, wanted: Mapping[str, Case]) -> dict[str, Any]:
    """Return the figures of each job, by name."""
    client = await connect_to(stack.temporal_address)
    figures: dict[str, Any] = {}
    for name, case in wanted.items():
        with scripted_service(stack, case.calls, case.tool_bytes, LONGEST):
            figures[name] = (await take(client, case)).figures()
    return figures


def _print(figures: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"{'':26}{'runs':>6}{'MB':>8}{'activations':>13}{'longest, ms':>13}{'replayed, ms':>14}")
    for name, row in figures.items():
        print(
            f"{name:<26}{row['runs']:>6}{row['history_mb']:>8.2f}{row['activations']:>13,}"
            f"{1e3 * row['longest_s']:>13.1f}{1e3 * row['longest_replayed_s']:>14.1f}"
        )
        if row["failure"]:
            print(f"    failed: {row['failure']}")


def main() -> int:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as directory:
        wanted = cases(Path(directory))
        tools = f"{Path(__file__).parent / 'tool'}:{directory}"
        with embedded_stack(engine="simulated", simulated_time_scale="0", tool_path=tools) as stack:
            figures = uvloop.run(measure(stack, wanted))
    _print(figures)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    way_out.run(main)
