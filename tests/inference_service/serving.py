"""The service on Temporal, as a process of its own would serve, and jobs that take one step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from uuid import uuid4

from temporalio.client import Client, WorkflowHandle
from temporalio.service import RPCError

from contracts.llm_step import LLMStepInput, LLMStepResult
from contracts.name import continue_queue, start_queue
from inference_service.worker import WorkerSettings, serve
from muster.connection import connect_to
from tests.inference_service.harness import Harness, step_input
from tests.inference_service.one_step import OneStep, OneStepInput

Handle = WorkflowHandle[OneStep, LLMStepResult]


@asynccontextmanager
async def serving(
    client: Client, h: Harness, model: str, **settings: timedelta | None
) -> AsyncIterator[asyncio.Event]:
    """Serve until the block ends, as a process of its own would; yields what begins the drain."""
    stop = asyncio.Event()
    address = client.service_client.config.target_host
    running = asyncio.create_task(
        serve(
            await connect_to(address),
            h.service,
            model=model,
            stop=stop,
            settings=WorkerSettings(**settings),  # type: ignore[arg-type]
            identity=f"test-{uuid4().hex[:8]}",
        )
    )
    try:
        yield stop
    finally:
        stop.set()
        await running


async def start(
    client: Client,
    model: str,
    step: LLMStepInput,
    *,
    is_new: bool = True,
    heartbeat_timeout: timedelta = timedelta(seconds=30),
) -> Handle:
    queue = start_queue(model) if is_new else continue_queue(model)
    return await client.start_workflow(
        OneStep.run,
        OneStepInput(step=step, queue=queue, heartbeat_timeout=heartbeat_timeout),
        id=f"one-step-{uuid4().hex}",
        task_queue=model,
    )


async def terminate(handles: list[Handle]) -> None:
    """Terminate jobs; one that takes a seat which another leaves may just have finished."""
    for handle in handles:
        with suppress(RPCError):
            await handle.terminate()


def unique_step(number: int = 0, **fields: object) -> LLMStepInput:
    return step_input(number, job_id=f"job-{uuid4().hex[:12]}", **fields)  # type: ignore[arg-type]
