"""The scripts inside the containers do their work on a real Temporal server."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from uuid import uuid4

import pytest
from temporalio import activity
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client
from temporalio.worker import Worker

from muster.connection import connect_to
from muster.stack.namespace import RETENTION, check_namespace
from muster.stack.temporal import temporal_program
from store.database import Database


@pytest.fixture
def root() -> Path:
    """Return the repository's root."""
    return Path(__file__).resolve().parents[2]


async def run(*command: str | Path, **env: str) -> tuple[int, str]:
    """Run a program in an environment of these variables; return its status and its output."""
    programs = os.pathsep.join((str(Path(temporal_program()).parent), os.environ["PATH"]))
    process = await asyncio.create_subprocess_exec(
        *command,
        env={"HOME": os.environ.get("HOME", "/"), "PATH": programs, **env},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_the_namespace_script_prepares_a_namespace_and_may_run_again(
    root: Path, temporal_address: str
) -> None:
    name = f"test-{uuid4().hex[:8]}"
    for _ in range(2):
        status, output = await run(
            "sh",
            root / "docker" / "temporal-namespace.sh",
            TEMPORAL_ADDRESS=temporal_address,
            TEMPORAL_NAMESPACE=name,
            RETENTION="720h",
        )
        assert status == 0, output
    client = await connect_to(temporal_address, name)
    await check_namespace(client)
    found = await client.workflow_service.describe_namespace(
        DescribeNamespaceRequest(namespace=name)
    )
    assert found.config.workflow_execution_retention_ttl.ToTimedelta() == RETENTION


async def test_migrations_run_as_a_program_and_may_run_again(
    root: Path, empty_database_url: str
) -> None:
    command = (sys.executable, "-m", "store.migrate")
    status, output = await run(*command, PYTHONPATH=str(root))
    assert status == 1
    assert output.startswith("error: MUSTER_DATABASE_URL is not set\nhint: ")
    for _ in range(2):
        status, output = await run(
            *command, PYTHONPATH=str(root), MUSTER_DATABASE_URL=empty_database_url
        )
        assert status == 0, output
    database = Database(empty_database_url)
    await database.check()
    await database.close()


@activity.defn
async def nothing() -> None:
    """Do nothing."""


async def test_a_container_is_healthy_while_its_worker_polls(
    root: Path, temporal_address: str, temporal_client: Client, tmp_path: Path
) -> None:
    queue = f"health-{uuid4().hex[:8]}"
    command = (sys.executable, root / "docker" / "health.py", queue)
    env = {
        "MUSTER_TEMPORAL_ADDRESS": temporal_address,
        "MUSTER_DATABASE_URL": "postgresql://nowhere",
        "MUSTER_DATA_DIR": str(tmp_path),
        "PYTHONPATH": str(root),
    }
    status, output = await run(*command, **env)
    assert status == 1
    assert "no worker on" in output
    async with Worker(temporal_client, task_queue=queue, activities=[nothing]):
        deadline = asyncio.get_running_loop().time() + 30
        while status and asyncio.get_running_loop().time() < deadline:
            status, output = await run(*command, **env)
    assert status == 0, output
