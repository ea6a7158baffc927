"""A Temporal server, our workflow worker and the scripted peer: what a workflow test needs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle, WorkflowHistory
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.service import RPCError
from temporalio.worker import Replayer, Worker

from activities.approval import check_approval
from contracts.agent import AgentSpec, Limits, ToolRef
from contracts.job import AgentJobInput, AgentJobResult, JobProgress
from contracts.name import (
    AGENT_WORKFLOW,
    AGENTS_QUEUE,
    PROGRESS_QUERY,
    TOOLS_QUEUE,
    continue_queue,
    start_queue,
)
from tests.workflows.peer import Peer, Reply, Script
from workflows.worker import WORKFLOWS, workflow_options

MODEL = "scripted"
DEADLINE_S = 30.0
STICKY_TIMEOUT = timedelta(seconds=1)
"""How long a task waits for the worker that has its job cached, before any worker may take it."""

T = TypeVar("T")
JobHandle = WorkflowHandle[Any, AgentJobResult]


def tool(name: str, **policy: Any) -> ToolRef:
    """A tool as an agent file names it."""
    return ToolRef.model_validate({"function": f"shop.tools:{name}", **policy})


def agent(*tools: ToolRef, **fields: Any) -> AgentSpec:
    """An agent with these tools."""
    return AgentSpec.model_validate(
        {"name": "clerk", "instructions": "Serve the customer.", "tools": tools, **fields}
    )


def limits(**fields: Any) -> Limits:
    """Limits that differ from the defaults in `fields` only."""
    return Limits.model_validate(fields)


async def within(awaitable: Awaitable[T]) -> T:
    """Await with the deadline that no test needs unless it fails."""
    return await asyncio.wait_for(awaitable, DEADLINE_S)


async def replay(history: WorkflowHistory, workflows: list[type] = WORKFLOWS) -> None:
    """Replay a history on today's code; raises if the two differ."""
    options = workflow_options()
    options["workflows"] = workflows
    replayer = Replayer(**options, data_converter=pydantic_data_converter)
    await replayer.replay_workflow(history)


class Stage:
    """Runs jobs against a script. On leaving, every history it made must replay.

    Without `tools` or `inference` nobody serves those queues.
    """

    def __init__(self, client: Client, *, tools: bool = True, inference: bool = True) -> None:
        self.client = client
        self._serve_tools = tools
        self._serve_inference = inference
        self.peer = Peer()
        self.handles: list[JobHandle] = []
        self._tools = AsyncExitStack()
        self._inference = AsyncExitStack()
        self._agents = AsyncExitStack()

    async def __aenter__(self) -> Stage:
        if self._serve_inference:
            await self._start_inference()
        if self._serve_tools:
            await self._start_tools()
        await self.start_agent_worker()
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            for handle in self.handles:
                await self._end(handle)
        finally:
            await self._agents.aclose()
            await self._inference.aclose()
            await self._tools.aclose()
        for handle in self.handles:
            for history in await self.histories(handle):
                await replay(history)

    async def histories(self, handle: JobHandle) -> list[WorkflowHistory]:
        """Return the histories of a job's runs, the last first."""
        found = [await handle.fetch_history()]
        while before := _run_before(found[-1]):
            earlier = self.client.get_workflow_handle(handle.id, run_id=before)
            found.append(await earlier.fetch_history())
        return found

    async def _end(self, handle: JobHandle) -> None:
        """End a job that a test has left running."""
        if (await handle.describe()).status == WorkflowExecutionStatus.RUNNING:
            with suppress(RPCError):  # it can end by itself in between
                await handle.terminate()

    async def _start_inference(self) -> None:
        continued: list[Callable[..., Any]] = [self.peer.llm_step, self.peer.session_hint]
        queues = {start_queue(MODEL): continued[:1], continue_queue(MODEL): continued}
        for queue, activities in queues.items():
            worker = Worker(self.client, task_queue=queue, activities=activities)
            await self._inference.enter_async_context(worker)

    async def _start_tools(self) -> None:
        activities: list[Callable[..., Any]] = [
            self.peer.open_job,
            self.peer.call_tool,
            check_approval,
        ]
        worker = Worker(self.client, task_queue=TOOLS_QUEUE, activities=activities)
        await self._tools.enter_async_context(worker)

    async def stop_inference(self) -> None:
        """Take the inference service away."""
        await self._inference.aclose()

    async def stop_tools(self) -> None:
        """Take the tool workers away."""
        await self._tools.aclose()

    async def start_agent_worker(self, *, max_cached_workflows: int = 1_000) -> None:
        """Start the worker under test; 0 cached workflows replay at every workflow task."""
        worker = Worker(
            self.client,
            task_queue=AGENTS_QUEUE,
            **workflow_options(),
            max_cached_workflows=max_cached_workflows,
            sticky_queue_schedule_to_start_timeout=STICKY_TIMEOUT,
        )
        await self._agents.enter_async_context(worker)

    async def stop_agent_worker(self) -> None:
        """Stop the worker under test; its cache is lost."""
        await self._agents.aclose()

    async def start(
        self, spec: AgentSpec, *replies: Reply, **script: Any
    ) -> tuple[JobHandle, Script]:
        """Start a job of an agent; the n-th reply is its n-th LLM step's."""
        job = AgentJobInput(agent=spec, input="Two apples, please.", model=MODEL)
        return await self.start_input(job, *replies, **script)

    async def start_input(
        self, job: AgentJobInput, *replies: Reply, **script: Any
    ) -> tuple[JobHandle, Script]:
        """Start a job with its whole input given."""
        job_id = f"job-{uuid4()}"
        self.peer.scripts[job_id] = Script(replies, **script)
        handle: JobHandle = await self.client.start_workflow(
            AGENT_WORKFLOW, job, id=job_id, task_queue=AGENTS_QUEUE, result_type=AgentJobResult
        )
        self.handles.append(handle)
        return handle, self.peer.scripts[job_id]

    async def run(
        self, spec: AgentSpec, *replies: Reply, **script: Any
    ) -> tuple[AgentJobResult, Script]:
        """Run a job to its end."""
        handle, kept = await self.start(spec, *replies, **script)
        return await within(handle.result()), kept

    async def reset_to_first_step(self, handle: JobHandle) -> JobHandle:
        """Reset a job to the workflow task that scheduled its first LLM step."""
        again = await reset(self.client, handle, after_task=1)
        self.handles.append(again)
        return again


async def reset(client: Client, handle: JobHandle, *, after_task: int) -> JobHandle:
    """Reset a job to the end of its n-th finished workflow task; the first is 0."""
    events = (await handle.fetch_history()).events
    tasks = [e.event_id for e in events if e.HasField("workflow_task_completed_event_attributes")]
    answer = await client.workflow_service.reset_workflow_execution(
        ResetWorkflowExecutionRequest(
            namespace=client.namespace,
            workflow_execution=WorkflowExecution(workflow_id=handle.id),
            reason="a test",
            workflow_task_finish_event_id=tasks[after_task],
            request_id=str(uuid4()),
        )
    )
    again: JobHandle = client.get_workflow_handle(
        handle.id, run_id=answer.run_id, result_type=AgentJobResult
    )
    return again


async def progress(handle: JobHandle) -> JobProgress:
    """Ask a job what it is doing."""
    answer: JobProgress = await handle.query(PROGRESS_QUERY, result_type=JobProgress)
    return answer


async def current_details(handle: JobHandle) -> str:
    """Return the Markdown that the Temporal UI shows for a job."""
    metadata: WorkflowMetadata = await handle.query(
        "__temporal_workflow_metadata", result_type=WorkflowMetadata
    )
    return metadata.current_details


def _run_before(history: WorkflowHistory) -> str:
    """Return the id of the run that continued as this one, or no text."""
    started = history.events[0].workflow_execution_started_event_attributes
    return started.continued_execution_run_id
