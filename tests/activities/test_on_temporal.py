"""Tool calls on a real Temporal server: delays kept, effects once, cancellations delivered."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import CancelledError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from contracts.tool import CallToolInput, CallToolResult
from store.database import Database
from store.tool_ledger import ToolLedger
from tests.activities.conftest import GOOD, HttpServer, request
from tests.activities.good_tool import Gate, gate_named
from tests.activities.one_call import OneCall, OneCallWorkflow, tool_worker

DEADLINE_S = 30.0
Handle = WorkflowHandle[OneCallWorkflow, CallToolResult]


@asynccontextmanager
async def _workflow(client: Client, call: CallToolInput, queue: str) -> AsyncIterator[Handle]:
    """Start the workflow that makes one call, on a worker of its own."""
    workflows = Worker(
        client,
        task_queue=f"{queue}-workflows",
        workflows=[OneCallWorkflow],
        workflow_runner=UnsandboxedWorkflowRunner(),
    )
    async with workflows, asyncio.timeout(DEADLINE_S):
        yield await client.start_workflow(
            OneCallWorkflow.run,
            OneCall(call, queue),
            id=queue,
            task_queue=f"{queue}-workflows",
        )


def _queue() -> str:
    return f"one-call-{uuid4().hex[:12]}"


async def _outcomes(database: Database, call: CallToolInput) -> list[str]:
    return [row.outcome.value for row in await ToolLedger(database).attempts(call.call.id)]


async def test_retry_after_429_comes_not_before_its_delay(
    temporal_client: Client, database: Database, http_server: HttpServer
) -> None:
    http_server.answers = [
        "503 Service Unavailable\n\n",
        "429 Too Many Requests\nRetry-After: 5\n\n",
        "200 OK\n\ndone",
    ]
    call, queue = request("get", {"url": http_server.url}, module=GOOD), _queue()
    started = asyncio.get_running_loop().time()
    async with (
        tool_worker(temporal_client, database, queue),
        _workflow(temporal_client, call, queue) as handle,
    ):
        result = await handle.result()
    took_s = asyncio.get_running_loop().time() - started
    assert result.content == "done"
    assert await _outcomes(database, call) == ["failed", "failed", "finished"]
    assert 5.0 <= took_s < 15.0
    assert http_server.requests == 3


async def test_effect_happens_once_though_the_worker_is_killed_before_it_is_recorded(
    temporal_client: Client, temporal_address: str, database: Database, database_url: str
) -> None:
    charges: dict[str, int] = {}
    requests: list[str] = []
    charged, answer = asyncio.Event(), asyncio.Event()

    async def charge(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        key = next(line[5:] for line in head.splitlines() if line.startswith("key: "))
        requests.append(key)
        charges.setdefault(key, 5)
        charged.set()
        await answer.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\npaid")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(charge, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    call, queue = request("charge", {"url": url}, module=GOOD), _queue()
    first = await _start_worker(temporal_address, database_url, queue)
    async with server, _workflow(temporal_client, call, queue) as handle:
        await charged.wait()
        first.kill()
        await first.wait()
        answer.set()
        second = await _start_worker(temporal_address, database_url, queue)
        try:
            assert (await handle.result()).content == "paid"
        finally:
            second.kill()
            await second.wait()
    assert requests == [call.call.id, call.call.id]
    assert charges == {call.call.id: 5}
    assert await _outcomes(database, call) == ["abandoned", "finished"]


async def _start_worker(address: str, database_url: str, queue: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.activities.one_call",
        address,
        database_url,
        queue,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )


@pytest.fixture
def gate() -> Iterator[Gate]:
    with gate_named("temporal") as found:
        yield found


async def test_cancelling_the_workflow_reaches_the_running_tool_at_once(
    temporal_client: Client, database: Database, gate: Gate
) -> None:
    call, queue = request("wait_async", {"gate": "temporal"}, module=GOOD), _queue()
    async with (
        tool_worker(temporal_client, database, queue),
        _workflow(temporal_client, call, queue) as handle,
    ):
        assert await asyncio.to_thread(gate.started.wait, DEADLINE_S)
        asked = asyncio.get_running_loop().time()
        await handle.cancel()
        assert await asyncio.to_thread(gate.cancelled.wait, DEADLINE_S)
        assert asyncio.get_running_loop().time() - asked < 2.0
        with pytest.raises(WorkflowFailureError) as caught:
            await handle.result()
    assert isinstance(caught.value.cause, CancelledError)
    assert await _outcomes(database, call) == ["cancelled"]


async def test_stopping_worker_hands_its_call_to_the_next_one(
    temporal_client: Client, database: Database, gate: Gate
) -> None:
    call, queue = request("wait", {"gate": "temporal"}, module=GOOD), _queue()
    async with _workflow(temporal_client, call, queue) as handle:
        async with tool_worker(temporal_client, database, queue):
            assert await asyncio.to_thread(gate.started.wait, DEADLINE_S)
        gate.go_on.set()
        async with tool_worker(temporal_client, database, queue):
            assert (await handle.result()).content == "waited"
        assert await _outcomes(database, call) == ["handed_back", "finished"]
