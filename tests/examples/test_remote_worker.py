"""The warehouse: a worker that knows nothing of Muster, whose stock an agent reserves."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4
from zipfile import ZipFile

import pytest
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import CancelledError

from contracts.agent import AgentSpec
from contracts.job import AgentJobResult
from contracts.tool_source import RemoteActivity
from muster.agent_file import parse_agent, read_agent_file
from muster.job import Jobs
from store.database import Database
from tests.acceptance.calling import calling, says

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "examples" / "remote_worker"
DEADLINE_S = 60.0

ORDER = {"tool": "reserve_stock", "arguments": {"item": "pears", "amount": 3}}


class Warehouse:
    """The worker as a process, and what its file says."""

    def __init__(self, address: str, directory: Path) -> None:
        self.queue = f"warehouse-{uuid4().hex[:8]}"
        self._address = address
        self._data = directory / "warehouse.db"
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, packing_s: float = 0.0) -> subprocess.Popen[str]:
        """Start it, with nothing of Muster on its path; return when it polls."""
        command = [sys.executable, "-m", "warehouse", "--address", self._address]
        command += ["--queue", self.queue, "--data", str(self._data)]
        process = subprocess.Popen(
            [*command, "--packing-s", str(packing_s)],
            cwd=WORKER,
            env={},
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == f"warehouse polls {self.queue!r}\n"
        return process

    def reservations(self) -> list[tuple[str, str, int, int]]:
        """Return key, item, amount, and how often it was asked for, of each reservation."""
        return self._rows("select key, item, amount, asked from reservation")

    def stock(self, item: str) -> int:
        """Return what is left of an item."""
        [(amount,)] = self._rows("select amount from stock where item = ?", item)
        return int(amount)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.02)

    def _rows(self, query: str, *values: str) -> list[Any]:
        with closing(sqlite3.connect(self._data, timeout=10.0)) as database:
            return database.execute(query, values).fetchall()

    def close(self) -> None:
        """Kill what still runs."""
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def warehouse(temporal_address: str, tmp_path: Path) -> Iterator[Warehouse]:
    found = Warehouse(temporal_address, tmp_path)
    yield found
    found.close()


def storekeeper(queue: str, agent: AgentSpec, heartbeat: timedelta | None = None) -> AgentSpec:
    """Return the example's agent, on a task queue of the test's own."""
    [tool] = agent.tools
    assert isinstance(tool.activity, RemoteActivity)
    update = {"queue": queue, "heartbeat": heartbeat or tool.activity.heartbeat}
    remote = tool.activity.model_copy(update=update)
    return agent.model_copy(update={"tools": (tool.model_copy(update={"activity": remote}),)})


def model(number: int, prompt: str) -> dict[str, Any]:
    """Order three pears, then say what was read."""
    return ORDER if number == 1 else says(prompt.rpartition("tool\n")[2].split("\n")[0])


def answered(result: AgentJobResult) -> Any:
    """Return what the model has read and said again: a tool's result."""
    assert result.answer is not None
    return json.loads(json.loads(result.answer)["answer"])


RESERVED = {"item": "pears", "reserved": 3, "left": 4}


@asynccontextmanager
async def job(
    client: Client, database: Database, agent: AgentSpec
) -> AsyncIterator[tuple[Any, Jobs]]:
    """Start a job of the agent."""
    async with calling(client, database, model) as stage, asyncio.timeout(DEADLINE_S):
        yield await stage.start(agent), Jobs(client)


def blocks(heading: str) -> dict[str, str]:
    """Return the code of a section of the guide to tools, by its language."""
    guide = (ROOT / "docs" / "guides" / "tools.md").read_text()
    [section] = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## )", guide, re.M | re.S)
    return dict(re.findall(r"^```(\w+)\n(.*?)^```$", section, re.M | re.S))


async def test_the_agent_of_the_guide_reserves_stock_in_the_warehouse(
    temporal_client: Client, database: Database, warehouse: Warehouse
) -> None:
    """The guide shows the example's own file, and that is what runs here."""
    shown = blocks("Activities in any language")["yaml"]
    assert shown == (WORKER / "agent.yaml").read_text()
    agent = storekeeper(warehouse.queue, parse_agent(shown, "tools.md").spec)
    warehouse.start()
    async with job(temporal_client, database, agent) as (handle, jobs):
        assert answered(await handle.result()) == RESERVED
        report = await jobs.report(handle.id)
    [(key, item, amount, asked)] = warehouse.reservations()
    assert (item, amount, asked, warehouse.stock("pears")) == ("pears", 3, 1, 4)
    [row] = report.rows[0].tools
    assert (row.call_id, row.tool) == (key, "reserve_stock")
    assert json.loads(row.content or "") == RESERVED


async def test_a_worker_killed_after_its_effect_reserves_once(
    temporal_client: Client, database: Database, warehouse: Warehouse
) -> None:
    """Case J5, of an activity: the second attempt comes under the same key."""
    agent = read_agent_file(WORKER / "agent.yaml").spec
    agent = storekeeper(warehouse.queue, agent, heartbeat=timedelta(seconds=2))
    first = warehouse.start(packing_s=DEADLINE_S)
    async with job(temporal_client, database, agent) as (handle, jobs):
        await warehouse.until(lambda: bool(warehouse.reservations()))
        first.kill()
        warehouse.start()
        assert answered(await handle.result()) == RESERVED
        [row] = (await jobs.report(handle.id)).rows[0].tools
    [(key, _, amount, asked)] = warehouse.reservations()
    assert (amount, asked, warehouse.stock("pears")) == (3, 2, 4)
    assert (row.call_id, row.attempts) == (key, 2)


async def test_a_cancelled_job_gives_its_order_back(
    temporal_client: Client, database: Database, warehouse: Warehouse
) -> None:
    agent = storekeeper(warehouse.queue, read_agent_file(WORKER / "agent.yaml").spec)
    warehouse.start(packing_s=DEADLINE_S)
    async with job(temporal_client, database, agent) as (handle, _):
        await warehouse.until(lambda: bool(warehouse.reservations()))
        await handle.cancel()
        with pytest.raises(WorkflowFailureError) as failed:
            await handle.result()
    assert isinstance(failed.value.cause, CancelledError)
    assert warehouse.reservations() == []
    assert warehouse.stock("pears") == 7


def test_the_worker_imports_temporal_alone() -> None:
    names = set()
    for node in ast.walk(ast.parse((WORKER / "warehouse.py").read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    assert names - sys.stdlib_module_names == {"temporalio"}


def test_the_worker_is_a_package_of_its_own(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "warehouse.py"):
        (source / name).write_text((WORKER / name).read_text())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", tmp_path, source], check=True, capture_output=True, timeout=100)
    [wheel] = tmp_path.glob("*.whl")
    with ZipFile(wheel) as found:
        [metadata] = [name for name in found.namelist() if name.endswith("METADATA")]
        needs = re.findall(r"^Requires-Dist: (\S+)", found.read(metadata).decode(), re.M)
        assert "warehouse.py" in found.namelist()
    [ours] = re.findall(r'"(temporalio==[\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert needs == [ours]
