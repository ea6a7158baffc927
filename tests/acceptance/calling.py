"""Whole jobs in this process: agent worker, tool worker, a model that a test scripts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import Worker

from activities.toolbox import Toolbox
from activities.worker import tool_activities
from contracts.agent import AgentSpec
from contracts.job import AgentJobInput, AgentJobResult
from contracts.name import AGENT_WORKFLOW, AGENTS_QUEUE
from inference_service.engine.simulated import SimulatedConfig
from muster.settings import load_settings
from muster.worker.tools import tool_workers
from store.database import Database
from store.schema import tool_ledger
from tests.inference_service.harness import harness
from tests.inference_service.serving import serving
from workflows.worker import workflow_options

Handle = WorkflowHandle[Any, AgentJobResult]
Reply = dict[str, Any]
Model = Callable[[int, str], Reply]
"""The reply to a prompt, by the number of the LLM step."""


def asks(*calls: tuple[str, dict[str, Any]]) -> Reply:
    """Reply with tool calls, as an agent with parallel calls does."""
    return {"calls": [{"tool": tool, "arguments": arguments} for tool, arguments in calls]}


def says(answer: str) -> Reply:
    """Reply with an answer."""
    return {"answer": answer}


@dataclass(frozen=True)
class Calling:
    """Runs jobs of one model."""

    client: Client
    database: Database
    model: str

    async def start(self, agent: AgentSpec, tenant: str = "default") -> Handle:
        """Start a job."""
        handle: Handle = await self.client.start_workflow(
            AGENT_WORKFLOW,
            AgentJobInput(agent=agent, input="Do it.", model=self.model, tenant=tenant),
            id=f"job-{uuid4()}",
            task_queue=AGENTS_QUEUE,
            result_type=AgentJobResult,
        )
        return handle

    async def ledger(self, job_id: str) -> list[sa.Row[Any]]:
        """Return the ledger's rows of a job's calls, in order."""
        table = tool_ledger.c
        query = sa.select(table.call_id, table.tool, table.outcome, table.result, table.error)
        of_job = query.where(table.job_id == job_id).order_by(table.call_id, table.attempt)
        return list(await self.database.fetch(of_job, {}))


@asynccontextmanager
async def calling(
    client: Client,
    database: Database,
    model: Model,
    *,
    max_tool_calls: int = 64,
    tools: bool = True,
    tool_groups: str = "",
    config: SimulatedConfig | None = None,
) -> AsyncIterator[Calling]:
    """Serve a scripted model, agents and, unless another process does, `tools`.

    Tools of groups, too, as a setting names them.
    """
    name = f"m-{uuid4().hex[:12]}"

    def respond(request: Any, prompt: str) -> str:
        number = int(request.request_id.split("#")[0].rpartition("/")[2])
        return json.dumps(model(number, prompt))

    async with AsyncExitStack() as stack:
        h = await stack.enter_async_context(harness(database, config=config, respond=respond))
        await stack.enter_async_context(serving(client, h, name))
        if tools:
            toolbox = await stack.enter_async_context(Toolbox())
            activities = tool_activities(database, toolbox)
            settings = load_settings(max_tool_calls=max_tool_calls, tool_groups=tool_groups)
            for worker in tool_workers(client, settings, activities):
                await stack.enter_async_context(worker)
        await stack.enter_async_context(
            Worker(
                client,
                task_queue=AGENTS_QUEUE,
                **workflow_options(),
            )
        )
        yield Calling(client, database, name)
