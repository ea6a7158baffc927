"""A whole stack of its own, shared by the tests of a module, and jobs to run on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import sqlalchemy as sa
from temporalio.client import Client
from temporalio.worker import Replayer

from contracts.agent import AgentSpec, ToolRef
from contracts.job import AgentJobResult
from contracts.name import AGENT_WORKFLOW
from inference_service.model import ModelFiles
from muster.connection import connect_to
from muster.job import Jobs
from muster.report import JobReport
from store.database import Database
from store.schema import step_ledger
from tests.stack.command_line import CommandLine
from workflows.worker import workflow_options

TOOLS = Path(__file__).parent / "tool"


def payer(name: str = "payer") -> AgentSpec:
    """Return an agent that pays three times, one after the other, and then answers."""
    names = ("first", "second", "third")
    tools = tuple(
        ToolRef(
            function="payment:pay",
            name=tool,
            after=names[number - 1 : number] if number else (),
            max_calls=1,
        )
        for number, tool in enumerate(names)
    )
    return AgentSpec(
        name=name, instructions="Pay, then answer.", tools=tools, answer_after=("third",)
    )


@dataclass
class Stage:
    """A running stack and what its tool did."""

    muster: CommandLine
    payments: Path
    jobs: Jobs
    database: Database
    client: Client
    model: str

    async def replay_all(self) -> int:
        """Replay every closed job's history on this code; return how many there were."""
        replayer = Replayer(
            **workflow_options(),
            data_converter=self.client.data_converter,
        )
        query = f'WorkflowType = "{AGENT_WORKFLOW}" AND ExecutionStatus != "Running"'
        histories = self.client.list_workflows(query).map_histories()
        results = await replayer.replay_workflows(histories, raise_on_replay_failure=False)
        assert not results.replay_failures, results.replay_failures
        return sum([1 async for _ in self.client.list_workflows(query)])

    async def stats(self) -> dict[str, float]:
        """Return what the inference service says of itself."""
        record = json.loads((self.muster.data_dir / "stack.json").read_text())
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"{record['inference_url']}/stats")
        stats: dict[str, float] = answer.json()
        return stats

    async def start(self, count: int, label: str) -> list[str]:
        """Start jobs with inputs that are the same for the same label."""
        return [
            await self.jobs.start(payer(), f"{label}: order {number}", model=self.model)
            for number in range(count)
        ]

    async def results(self, job_ids: list[str]) -> list[AgentJobResult]:
        """Wait for jobs' ends."""
        return list(await asyncio.gather(*(self.jobs.result(job_id) for job_id in job_ids)))

    async def reports(self, job_ids: list[str]) -> list[JobReport]:
        """Return what the histories say of jobs."""
        return [await self.jobs.report(job_id) for job_id in job_ids]

    def charges(self, job_ids: list[str]) -> list[str]:
        """Return the keys that were charged for these jobs."""
        return sorted(
            path.name
            for path in self.payments.iterdir()
            if any(path.name.startswith(job_id) for job_id in job_ids)
        )

    async def accepted(self, job_ids: list[str]) -> dict[str, int]:
        """Return how many attempts of each LLM step were accepted, by step id."""
        table = step_ledger.c
        accepted = sa.func.count().filter(table.outcome == "finished")
        query = (
            sa.select(table.step_id, accepted.label("accepted"))
            .where(table.job_id.in_(job_ids))
            .group_by(table.step_id)
        )
        return {row.step_id: row.accepted for row in await self.database.fetch(query, {})}


@asynccontextmanager
async def running_stack(directory: Path, **environment: str) -> AsyncIterator[Stage]:
    """Bring a stack up, with clients to it, and take it down at the end."""
    payments = directory / "payments"
    payments.mkdir()
    muster = CommandLine(directory / "data")
    muster.environment |= {
        "MUSTER_TOOL_PATH": str(TOOLS),
        "TEST_PAYMENT_DIR": str(payments),
        **environment,
    }
    done = await asyncio.to_thread(muster.run, "up", "--detach")
    assert done.returncode == 0, done.stdout + done.stderr
    try:
        record = json.loads((muster.data_dir / "stack.json").read_text())
        client = await connect_to(record["temporal_address"])
        database = Database(record["database_url"])
        yield Stage(muster, payments, Jobs(client), database, client, record["model"])
        await database.close()
    finally:
        await asyncio.to_thread(muster.end)


@pytest_asyncio.fixture(scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """Return a running stack whose engine is simulated, at half its real pace."""
    directory = tmp_path_factory.mktemp("stack")
    async with running_stack(directory, MUSTER_SIMULATED_TIME_SCALE="0.5") as stage:
        yield stage


@pytest_asyncio.fixture(scope="module")
async def real_stage(
    tmp_path_factory: pytest.TempPathFactory, model_files: ModelFiles
) -> AsyncIterator[Stage]:
    """Return a running stack with vLLM and the small real model."""
    async with running_stack(
        tmp_path_factory.mktemp("stack"),
        MUSTER_ENGINE="vllm",
        MUSTER_MODEL=str(model_files.path),
        MUSTER_MODEL_NAME="smollm2",
        MUSTER_MAX_NUM_SEQS="4",
    ) as stage:
        yield stage
