"""A whole stack of its own, shared by the tests of a module, and jobs to run on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import sqlalchemy as sa

from contracts.agent import AgentSpec, ToolRef
from contracts.job import AgentJobResult
from muster.connection import connect_to
from muster.job import Jobs
from muster.report import JobReport
from store.database import Database
from store.schema import step_ledger
from tests.stack.command_line import CommandLine

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
    model: str

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


@pytest.fixture(scope="module")
def muster_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CommandLine, Path]]:
    """Bring a stack with the simulated engine up, in real time."""
    payments = tmp_path_factory.mktemp("payments")
    muster = CommandLine(tmp_path_factory.mktemp("stack") / "data")
    muster.environment |= {
        "MUSTER_TOOL_PATH": str(TOOLS),
        "MUSTER_SIMULATED_TIME_SCALE": "0.5",
        "TEST_PAYMENT_DIR": str(payments),
    }
    done = muster.run("up", "--detach")
    assert done.returncode == 0, done.stdout + done.stderr
    yield muster, payments
    muster.end()


@pytest_asyncio.fixture(scope="module")
async def stage(muster_up: tuple[CommandLine, Path]) -> AsyncIterator[Stage]:
    """Return the running stack with clients to it."""
    muster, payments = muster_up
    record = json.loads((muster.data_dir / "stack.json").read_text())
    client = await connect_to(record["temporal_address"])
    database = Database(record["database_url"])
    yield Stage(muster, payments, Jobs(client), database, record["model"])
    await database.close()
