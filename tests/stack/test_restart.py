"""A part that dies is started again, is seen to have been, and has lost nothing."""

from __future__ import annotations

import asyncio
import json

import asyncpg
import psutil
from temporalio.client import Client

from tests.stack.command_line import CommandLine, is_gone, kill, wait_until


def is_up_again(muster: CommandLine, name: str, restarts: int) -> bool:
    part = muster.part(name)
    return (part["state"], part["restarts"]) == ("up", restarts)


def kill_part(muster: CommandLine, name: str, restarts: int) -> None:
    """Kill a part's process and wait until it is up again for the n-th time."""
    pid = muster.part(name)["pid"]
    kill(pid)
    wait_until(lambda: is_up_again(muster, name, restarts))
    assert muster.part(name)["pid"] != pid


def database_url(muster: CommandLine) -> str:
    url: str = json.loads((muster.data_dir / "stack.json").read_text())["database_url"]
    return url


def test_worker_that_dies_is_restarted_and_seen_in_status(muster: CommandLine) -> None:
    muster.up("temporal,postgres,agents")
    for restarts in (1, 2):
        kill_part(muster, "agents", restarts)
    status = muster.status()
    assert status["up"]
    assert {part["name"]: part["restarts"] for part in status["parts"]} == {
        "temporal": 0,
        "postgres": 0,
        "agents": 2,
    }
    assert "ended with signal SIGKILL" in (muster.data_dir / "log" / "stack.log").read_text()


def test_postgres_recovers_what_was_committed_before_a_kill(muster: CommandLine) -> None:
    muster.up("postgres")

    async def write() -> None:
        connection = await asyncpg.connect(database_url(muster))
        await connection.execute("create table kept (n int)")
        await connection.execute("insert into kept values (42)")
        connection.terminate()

    async def read() -> int:
        connection = await asyncpg.connect(database_url(muster))
        found: int = await connection.fetchval("select n from kept")
        await connection.close()
        return found

    asyncio.run(write())
    server = psutil.Process(muster.part("postgres")["pid"])
    before = [server, *server.children(recursive=True)]
    kill_part(muster, "postgres", 1)
    assert asyncio.run(read()) == 42
    assert all(is_gone(process) for process in before), "a killed server left children"


def test_postgres_starts_over_a_lock_file_that_names_a_live_process(muster: CommandLine) -> None:
    """After a reboot, the process id in a stale lock may be that of any process."""
    muster.up("postgres")
    lock = muster.data_dir / "postgres" / "data" / "postmaster.pid"
    content = lock.read_text()
    muster.end()
    _, _, rest = content.partition("\n")
    lock.write_text(f"1\n{rest}")
    muster.up("postgres")


async def test_temporal_keeps_its_workflows_over_a_kill(muster: CommandLine) -> None:
    await asyncio.to_thread(muster.up, "temporal")
    client = await Client.connect(f"127.0.0.1:{muster.temporal_port}")
    await client.start_workflow("Kept", id="kept", task_queue="nobody")
    await asyncio.to_thread(kill_part, muster, "temporal", 1)
    client = await Client.connect(f"127.0.0.1:{muster.temporal_port}")
    assert (await client.get_workflow_handle("kept").describe()).workflow_type == "Kept"


def test_doctor_names_what_is_down_and_passes_when_all_is_up(muster: CommandLine) -> None:
    muster.data_dir.mkdir()
    done = muster.run("doctor")
    assert done.returncode == 1
    assert "FAIL  stack              it is down\n      hint: muster up" in done.stdout

    muster.up("temporal,postgres,agents")
    checks = {
        check["check"]: check
        for check in json.loads(muster.run("doctor", "--json").stdout)["checks"]
    }
    ok = {name for name, check in checks.items() if check["ok"]}
    assert ok >= {"stack", "temporal", "postgres", "stuck jobs", "agents worker", "settings"}
    assert not checks["inference"]["ok"]
    assert checks["inference"]["hint"]


def test_doctor_warns_of_a_setting_that_does_not_exist(muster: CommandLine) -> None:
    done = muster.run("doctor", MUSTER_TEMPORAL_PROT="7000")
    assert "FAIL  settings           unknown variables: MUSTER_TEMPORAL_PROT" in done.stdout
