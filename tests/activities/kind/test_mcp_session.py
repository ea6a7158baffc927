"""Sessions with MCP servers: whose they are, what ends them, and what never outlives them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from activities.error_map import FailureKind
from activities.kind.mcp import McpTools
from activities.mcp import pool
from contracts.error import UnavailableError
from tests.activities.kind.mcp_client import (
    ROOT,
    call,
    describe,
    failure,
    is_alive,
    opened,
    program,
    shop,
    until,
)

WORKER = """
import asyncio, sys
from activities.kind.mcp import McpTools
from activities.secret import Secrets
from tests.activities.kind.mcp_client import call, program

async def main():
    print(await call(McpTools(Secrets()), program("bad_server", "well"), "do"), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest_asyncio.fixture
async def tools() -> AsyncIterator[McpTools]:
    """Return the kind, closed at last."""
    async with opened() as found:
        yield found


async def _pid(tools: McpTools, tenant: str = "a", way: str = "well", **mcp: object) -> int:
    """Return which process answers."""
    answer = await call(tools, program("bad_server", way, **mcp), "do", tenant=tenant)
    return int(answer.rpartition(" ")[2])


async def test_tenants_and_configurations_never_share_a_process(
    tools: McpTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_SHOP", "first-key")
    first = await _pid(tools)
    assert await _pid(tools) == first
    secret = await _pid(tools, env={"KEY": "${env:KEY_OF_SHOP}"})
    monkeypatch.setenv("KEY_OF_SHOP", "second-key")
    others = [
        secret,
        await _pid(tools, tenant="b"),
        await _pid(tools, way="well, too"),
        await _pid(tools, env={"KEY": "1"}),
        await _pid(tools, env={"KEY": "${env:KEY_OF_SHOP}"}),
    ]
    assert len({first, *others}) == 6
    assert await _pid(tools) == first


async def test_calls_that_come_at_once_share_the_session_they_open(tools: McpTools) -> None:
    assert len(set(await asyncio.gather(*(_pid(tools) for _ in range(10))))) == 1


async def test_process_that_dies_in_a_call_is_replaced(tools: McpTools) -> None:
    mcp = shop()
    before = await call(tools, mcp, "who")
    found = await failure(tools, mcp, "crash")
    assert found.kind is FailureKind.TRANSIENT
    assert "ended with status 3; its last words: " in found.text
    assert found.text.endswith("out of paper")
    assert await call(tools, mcp, "who") != before


async def test_process_that_dies_between_calls_is_replaced(tools: McpTools) -> None:
    pid = await _pid(tools)
    os.kill(pid, 9)
    await until(lambda: not is_alive(pid))
    answers = [await _pid_or_none(tools) for _ in range(2)]  # the first may come too early
    assert answers[-1] not in (None, pid)


async def _pid_or_none(tools: McpTools) -> int | None:
    try:
        return await _pid(tools)
    except UnavailableError:
        return None


async def test_process_that_stands_still_is_given_up_with_all_it_started(
    tools: McpTools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.mcp.session.PROBE_S", 0.3)
    monkeypatch.setattr("activities.mcp.program.END_GRACE_S", 0.3)
    mcp, started = shop(), tmp_path / "started"
    stuck = int((await call(tools, mcp, "who")).split()[0])
    child = int(await call(tools, mcp, "child"))
    waiting = asyncio.create_task(call(tools, mcp, "stand_still", started=str(started)))
    await until(started.exists)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert int((await call(tools, mcp, "who")).split()[0]) != stuck
    await until(lambda: not is_alive(stuck) and not is_alive(child))


async def test_session_is_kept_for_who_still_waits_in_it(
    tools: McpTools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.mcp.session.PROBE_S", 0.0)  # no session answers that fast
    mcp = shop()
    first = (await call(tools, mcp, "who")).split()[0]
    files = [tmp_path / name for name in ("1", "2", "3", "4")]
    calls = [
        asyncio.create_task(call(tools, mcp, "wait", started=str(one), cancelled=str(two)))
        for one, two in (files[:2], files[2:])
    ]
    await until(lambda: files[0].exists() and files[2].exists())
    calls[0].cancel()
    await asyncio.wait(calls[:1])
    assert (await call(tools, mcp, "who")).split()[0] != first
    assert is_alive(int(first))
    assert not calls[1].done()
    calls[1].cancel()
    await asyncio.wait(calls[1:])
    await until(lambda: not is_alive(int(first)))


async def test_server_that_ignores_its_end_is_killed_when_the_worker_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("activities.mcp.program.END_GRACE_S", 0.3)
    async with opened() as tools:
        pid = await _pid(tools, way="stays")
        assert is_alive(pid)
    assert not is_alive(pid)


async def test_server_does_not_outlive_a_worker_that_is_killed() -> None:
    worker = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        WORKER,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
    )
    assert worker.stdout is not None
    pid = int((await worker.stdout.readline()).decode().rpartition(" ")[2])
    assert is_alive(pid)
    worker.kill()
    await worker.wait()
    await until(lambda: not is_alive(pid))


async def test_idle_session_ends_and_the_next_call_opens_another(
    tools: McpTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "IDLE_S", 0.0)
    pid = await _pid(tools)
    await until(lambda: not is_alive(pid))
    assert await _pid(tools) != pid


async def test_session_that_was_unused_longest_makes_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pool, "MAX_SESSIONS", 2)
    async with opened() as tools:
        first, second = await _pid(tools, "first"), await _pid(tools, "second")
        assert await _pid(tools, "first") == first
        await _pid(tools, "third")
        await until(lambda: not is_alive(second))
        assert await _pid(tools, "first") == first


async def test_too_many_sessions_in_use_are_one_clear_error_that_passes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pool, "MAX_SESSIONS", 1)
    async with opened() as tools:
        started = tmp_path / "started"
        waiting = asyncio.create_task(
            call(tools, shop(), "wait", started=str(started), cancelled=str(tmp_path / "end"))
        )
        await until(started.exists)
        with pytest.raises(UnavailableError, match="all in use, the limit is 1"):
            await _pid(tools, "b")
        waiting.cancel()
        await asyncio.wait({waiting})
        assert await _pid(tools, "b")


async def test_caller_that_gives_up_while_a_server_starts_leaves_no_process(
    tools: McpTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = program("bad_server", "hangs at list", list_timeout=0.5)
    asking = asyncio.create_task(describe(tools, hanging))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    with pytest.raises(UnavailableError, match="did not connect"):
        await describe(tools, hanging)
