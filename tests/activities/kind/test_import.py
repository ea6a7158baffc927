"""Modules of tools that hang or raise anything when they are imported hurt nobody else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
from temporalio.exceptions import ApplicationError

from activities.kind import function
from activities.kind.function import FunctionTools
from contracts.agent import ToolRef
from contracts.error import BadInputError
from contracts.tool import ToolOutcome
from tests.activities.bad_tool import HANGS
from tests.activities.conftest import GOOD, Caller, request

HANGING = "tests.activities.hanging_module"
MANY = 40
"""More than the threads of any event loop's pool."""


@pytest.fixture(autouse=True)
def _let_go() -> Iterator[None]:
    HANGS.clear()
    yield
    HANGS.set()


async def test_import_that_hangs_has_one_thread_and_stops_no_other_tool(
    call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function, "LOAD_TIMEOUT_S", 0.01)
    for number in range(MANY):
        hanging = request("never", module=HANGING, call_id=f"job-1/b/{number}/0")
        with pytest.raises(ApplicationError, match="importing its module has not ended"):
            await call(hanging)
    threads = [thread.name for thread in threading.enumerate()]
    assert threads.count(f"load {HANGING}:never") == 1
    monkeypatch.undo()

    quick = request("shout", {"text": "hi"}, module=GOOD, call_id="job-1/c/1/0")
    assert (await call(quick)).content == "HI"
    HANGS.set()
    late = request("never", module=HANGING, call_id="job-1/c/2/0")
    assert (await call(late)).content == "loaded"


async def test_whatever_an_import_raises_is_the_tools_error() -> None:
    interrupting = ToolRef(function="tests.activities.interrupting_module:f")
    with pytest.raises(BadInputError, match="importing its module fails with KeyboardInterrupt"):
        await FunctionTools().load(interrupting)


async def test_result_that_hangs_while_it_becomes_text_has_timed_out(call: Caller) -> None:
    brief = timedelta(milliseconds=50)
    for number in range(MANY):
        hanging = request("result_that_hangs", timeout=brief, call_id=f"job-1/b/{number}/0")
        with pytest.raises(ApplicationError, match="no answer within"):
            await call(hanging)
    quick = request("shout", {"text": "hi"}, module=GOOD, call_id="job-1/c/1/0")
    assert (await call(quick)).outcome is ToolOutcome.OK
