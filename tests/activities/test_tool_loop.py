"""Asynchronous tools run on a loop of their own: one that blocks hurts nobody who is not one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from activities import tool_loop
from activities.execution import ToolExecution
from activities.thread import Ended
from activities.tool import LoadedTool
from activities.tool_loop import ToolLoop

DEADLINE_S = 10.0


class Block:
    """An asynchronous tool that blocks its loop until it is let go."""

    def __init__(self) -> None:
        self.started, self.go_on = threading.Event(), threading.Event()

    async def __call__(self) -> str:
        self.started.set()
        assert self.go_on.wait(30)
        return "blocked"


async def prompt() -> str:
    await asyncio.sleep(0)
    return "prompt"


async def current_thread() -> str:
    return threading.current_thread().name


@pytest.fixture
def block() -> Iterator[Block]:
    found = Block()
    yield found
    found.go_on.set()


async def begin(loop: ToolLoop, block: Block) -> asyncio.Task[Ended]:
    """Let a tool block a loop."""
    running = asyncio.create_task(loop.run(block, "block"))
    assert await asyncio.to_thread(block.started.wait, DEADLINE_S)
    return running


async def test_tool_that_blocks_does_not_hold_the_workers_loop(block: Block) -> None:
    """This test runs on that loop: it would not get here."""
    loop = ToolLoop()
    running = await begin(loop, block)
    assert not running.done()
    block.go_on.set()
    assert (await running).value == "blocked"


async def test_users_tools_run_on_that_loop_and_ours_on_the_workers() -> None:
    execution = ToolExecution()
    ran = {
        is_foreign: await execution.call(
            LoadedTool("where", True, lambda *_: current_thread, is_foreign), current_thread, 10.0
        )
        for is_foreign in (True, False)
    }
    here = threading.current_thread().name
    assert {key: end.value for key, end in ran.items()} == {True: "async-tools", False: here}


async def test_plain_function_that_returns_a_coroutine_is_awaited_on_that_loop_too() -> None:
    tool = LoadedTool("where", False, lambda *_: current_thread, is_foreign=True)
    assert (await ToolExecution().call(tool, current_thread, 10.0)).value == "async-tools"


async def test_call_that_a_blocked_loop_does_not_begin_goes_to_a_new_one(
    block: Block, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tool_loop, "STALL_LIMIT_S", 0.05)
    loop = ToolLoop()
    running = await begin(loop, block)
    ends = await asyncio.gather(*(loop.run(prompt, "prompt") for _ in range(3)))
    assert [end.value for end in ends] == ["prompt"] * 3
    assert not running.done()
    assert [r.getMessage() for r in caplog.records] == [
        "asynchronous tools stand still: block; 'prompt' waited 0.05 s and goes to a new loop"
    ]
    block.go_on.set()
    assert (await running).value == "blocked", "what it did is not lost"


async def test_blocked_loops_are_bounded_and_forgotten_when_they_go_on(
    block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_loop, "STALL_LIMIT_S", 0.05)
    monkeypatch.setattr(tool_loop, "MAX_STALLED_LOOPS", 1)
    loop = ToolLoop()
    running = await begin(loop, block)
    refused = await loop.run(prompt, "prompt")
    assert "1 loops of asynchronous tools stand still, the limit is 1" in str(refused.error)
    block.go_on.set()
    await running
    async with asyncio.timeout(DEADLINE_S):
        while (await loop.run(prompt, "prompt")).value != "prompt":
            pass


async def test_system_exit_in_a_task_of_a_tool_ends_nothing_else() -> None:
    loop = ToolLoop()
    began: list[asyncio.Task[None]] = []

    async def leave() -> None:
        raise SystemExit(3)

    async def careless() -> str:
        began.append(asyncio.create_task(leave()))
        await asyncio.sleep(0.01)
        return "still here"

    assert (await loop.run(careless, "careless")).value == "still here"
    assert isinstance(began[0].exception(), SystemExit)
    assert (await loop.run(prompt, "prompt")).value == "prompt"


async def test_cancellation_is_delivered_there_and_awaited() -> None:
    loop, started, order = ToolLoop(), threading.Event(), list[str]()

    async def cleans_up() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            order.append("cleaned up")
            raise

    running = asyncio.create_task(loop.run(cleans_up, "cleans_up"))
    assert await asyncio.to_thread(started.wait, DEADLINE_S)
    running.cancel()
    end = await running
    order.append("returned")
    assert order == ["cleaned up", "returned"]
    assert isinstance(end.error, asyncio.CancelledError)


async def test_loop_that_nobody_uses_any_more_ends(block: Block) -> None:
    def alive() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name == "async-tools"]

    before = set(alive())
    loop = ToolLoop()
    await loop.run(prompt, "prompt")
    (thread,) = set(alive()) - before
    stop: Callable[[float], None] = thread.join
    del loop
    await asyncio.to_thread(stop, DEADLINE_S)
    assert not thread.is_alive()
