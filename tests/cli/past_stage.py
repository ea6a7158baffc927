"""Jobs whose past is in PostgreSQL: a scripted peer that keeps conversations and the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from temporalio import activity
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import DeleteWorkflowExecutionRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from contracts.job import OpenJobInput, OpenJobResult
from contracts.llm_step import LLMStepInput, LLMStepResult, Outcome
from contracts.message import ContextRef, Message, Role, content_hash
from contracts.name import LLM_STEP, OPEN_JOB
from muster.agent_file import parse_agent
from muster.archiver import Archiver
from muster.job import Jobs
from muster.past import Past
from store.attempt import AlreadyFinished, AttemptOutcome
from store.context import ContextStore, TokenRun, chain
from store.database import Database
from store.projection import ProjectedJob, Projections
from store.step_ledger import StepLedger
from tests.cli.stage import AGENT, DEADLINE_S, MODEL, SamePeer, Stage
from tests.workflows.peer import Reply, Script, Tool, returns

REPLICA = "engine-0"

DROP_DEADLINE_S = 100.0
"""The server deletes a run once its queues have written down that its close is done."""


class StoringPeer(SamePeer):
    """A scripted peer that stores what the real services store."""

    def __init__(self, database: Database) -> None:
        super().__init__()
        self.ledger = StepLedger(database)
        self._contexts = ContextStore(database)

    @activity.defn(name=OPEN_JOB)
    async def open_job(self, opening: OpenJobInput) -> OpenJobResult:
        """Store the opening conversation."""
        system = Message(role=Role.SYSTEM, content=opening.agent.instructions)
        head = await self._contexts.put(None, [system, *opening.agent.examples])
        return OpenJobResult(context=ContextRef(head=head), toolset=None)

    @activity.defn(name=LLM_STEP)
    async def llm_step(self, step: LLMStepInput) -> LLMStepResult:
        """Claim the step, reply as the script says, commit."""
        claim = await self.ledger.claim(
            step=step,
            digest=content_hash(step.model_dump(mode="json")),
            replica=REPLICA,
            task_token=activity.info().task_token,
        )
        if isinstance(claim, AlreadyFinished):
            return claim.result
        number = int(step.step_id.rpartition("/")[2])
        result = await self.script.replies[number - 1](step)
        result = result.model_copy(
            update={"epoch": claim.epoch, "usage": claim.past + result.usage}
        )
        if result.outcome is Outcome.CANCELLED or result.message is None:
            cancelled = AttemptOutcome.CANCELLED
            await self.ledger.close_attempt(step.step_id, claim.epoch, cancelled, result.usage)
            return result
        assert step.base is not None
        append = [*step.append, result.message]
        head = chain(step.base.head, append)[-1].hash
        result = result.model_copy(
            update={"context": ContextRef(head=head, token_run=step.step_id)}
        )
        run = TokenRun(step.step_id, step.base.token_run, "tokenizer", [1, 2, 3])
        await self.ledger.commit(result, parent=step.base.head, append=append, run=run)
        return result


class PastStage(Stage):
    """The workers of one test on a database of its own, and an archiver that sweeps on demand."""

    def __init__(self, client: Client, database: Database) -> None:
        super().__init__(client)
        self.database = database
        self.jobs = Jobs(client, Past(database))
        self.storing = StoringPeer(database)
        self.peer = self.storing
        self.archiver = Archiver(client, database)
        self.projections = Projections(database)

    async def start_job(
        self, *replies: Reply, tool: Tool | None = None, text: str = AGENT, said: str = "Berlin"
    ) -> str:
        """Start a job and return its id."""
        self.peer.script = Script(replies, tools={"find": tool or returns("one coat")})
        return await self.jobs.start(parse_agent(text, "agent.yaml").spec, said, model=MODEL)

    async def finished_job(self, *replies: Reply, **script: Any) -> str:
        """Run a job to its end, however it ends, and return its id."""
        job_id = await self.start_job(*replies, **script)
        await self.jobs.wait(job_id)
        return job_id

    async def archived(self, job_id: str, runs: int = 1) -> ProjectedJob:
        """Sweep until that many runs of a job are archived; visibility may take its time."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                await self.archiver.collect()
                row = await self.projections.job(job_id)
                if row and row.runs >= runs:
                    return row

    async def drop(self, job_id: str, run_id: str = "") -> None:
        """Make the server forget a job, or one run of it; it takes up to a minute over that."""
        execution = WorkflowExecution(workflow_id=job_id, run_id=run_id)
        await self.client.workflow_service.delete_workflow_execution(
            DeleteWorkflowExecutionRequest(
                namespace=self.client.namespace, workflow_execution=execution
            )
        )
        handle = self.client.get_workflow_handle(job_id, run_id=run_id or None)
        async with asyncio.timeout(DROP_DEADLINE_S):
            while True:
                try:
                    await handle.describe()
                    await asyncio.sleep(0.2)
                except RPCError as error:
                    if error.status is not RPCStatusCode.NOT_FOUND:
                        raise
                    return

    async def rows(self, table: str) -> Sequence[str]:
        """Return every row of a table as text, in an order of its own."""
        found = await self.database.fetch(sa.text(f"SELECT t::text FROM {table} t ORDER BY 1"))
        return [row[0] for row in found]

    async def projected(self) -> Dump:
        """Return all projections, to the last byte."""
        return Dump(*[await self.rows(table) for table in ("jobs", "turns", "calls")])


@dataclass(frozen=True, slots=True)
class Dump:
    """The text of every row of the projections."""

    jobs: Sequence[str]
    turns: Sequence[str]
    calls: Sequence[str]
