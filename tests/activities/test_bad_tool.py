"""Whatever a tool does, it ends as one clear error and the worker lives on."""

from __future__ import annotations

import io
from datetime import timedelta
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError

from activities import execution
from activities.output import MAX_PRINTED_CHARS, guarded_output
from contracts.agent import OnFailure
from contracts.tool import ToolOutcome
from tests.activities.conftest import Caller, request

PERMANENT = [
    ("own_refusal", {}, "NoSuchCustomerError: no such customer"),
    ("bug", {}, 'TypeError: can only concatenate str (not "int") to str'),
    ("group", {}, "ValueError: bad; TypeError: bug"),
    ("system_exit", {}, "SystemExit: tool left"),
    ("system_exit_async", {}, "SystemExit: tool left"),
    ("keyboard_interrupt", {}, "KeyboardInterrupt"),
    ("cancels_itself", {}, "CancelledError: mine"),
    ("cancelled_future", {}, "CancelledError"),
    ("stop_iteration", {}, "StopIteration"),
    ("endless_recursion", {}, "RecursionError: maximum recursion depth exceeded"),
    ("broken_message", {}, "BrokenMessageError: (its message cannot be made: RuntimeError)"),
    ("long_message", {}, "… (9,996,014 more characters)"),
    ("returns_nan", {}, "it holds NaN or an infinity, which JSON does not have"),
    ("returns_generator", {}, "it holds a generator; return a list"),
    ("returns_endless", {}, "it holds a generator; return a list"),
    ("returns_opaque", {}, "Unable to serialize unknown type"),
    ("returns_bytes", {}, "returned a bytes that cannot become text"),
    ("returns_surrogate", {}, "it has characters that UTF-8 cannot encode"),
    ("returns_itself", {}, "it contains itself"),
    ("returns_deep", {}, "it is nested deeper than 200 levels"),
    ("returns_laughs", {}, "(measured in part) has 2,000,00"),
    (
        "returns_large",
        {"n": 4_000_000},
        "the result of tool 'returns_large' has 4,000,000 bytes, the limit is 256,000 bytes",
    ),
    (
        "returns_many",
        {"n": 200_000},
        "the result of tool 'returns_many' has 1,288,891 bytes, the limit is 256,000 bytes",
    ),
]


@pytest.mark.parametrize(("function", "arguments", "text"), PERMANENT)
async def test_permanent_failure_is_one_attempt_and_the_policy_says_for_whom(
    call: Caller, function: str, arguments: dict[str, Any], text: str
) -> None:
    told = await call(request(function, arguments))
    assert told.outcome is ToolOutcome.ERROR
    assert text in told.content
    assert len(told.content) < 5_000
    with pytest.raises(ApplicationError) as caught:
        await call(
            request(function, arguments, on_failure=OnFailure.FAIL_JOB, call_id="job-1/b/2/0")
        )
    assert caught.value.non_retryable
    assert text in caught.value.message
    assert caught.value.__cause__ is None  # a cause would carry texts of any size along


async def test_log_of_a_bug_has_its_innermost_frames_in_bounds(
    call: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    await call(request("bug"))
    await call(request("long_message", call_id="job-1/b/2/0"))
    bug, long = (record.getMessage() for record in caplog.records)
    assert bug.startswith("tool 'bug' failed: TypeError: can only concatenate")
    assert 'bad_tool.py", line' in bug
    assert len(long) < 10_000


@pytest.mark.parametrize("function", ["network", "busy"])
async def test_transient_failure_is_retryable(call: Caller, function: str) -> None:
    with pytest.raises(ApplicationError) as caught:
        await call(request(function))
    assert not caught.value.non_retryable


async def test_errors_of_a_task_group_are_the_errors_in_it(call: Caller) -> None:
    result = await call(request("task_group", on_failure=OnFailure.FAIL_JOB))
    assert result.content == "error: ValueError: no such customer"


async def test_message_that_utf8_cannot_encode_is_replaced(call: Caller) -> None:
    assert (await call(request("surrogate_message"))).content == "error: ValueError: ? \x00"


async def test_result_within_the_policys_own_limit_passes(call: Caller) -> None:
    large = request("returns_large", {"n": 900_000}, max_result_bytes=1_000_000)
    blob = (await call(large)).blob
    assert blob is not None and blob.bytes == 900_000


async def test_size_counts_as_json_so_that_it_bounds_the_payload(call: Caller) -> None:
    quotes = request("quotes", {"n": 60}, max_result_bytes=100)
    result = await call(quotes)
    assert "has 120 bytes, the limit is 100 bytes" in result.content


async def test_async_tool_that_ignores_its_cancellation_is_left(
    call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "STOP_GRACE_S", 0.05)
    stubborn = request("ignores_cancellation", timeout=timedelta(milliseconds=50))
    with pytest.raises(ApplicationError, match="no answer within"):
        await call(stubborn)


async def test_tool_that_prints_megabytes_loses_what_is_over_its_bound(
    call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = io.StringIO()
    monkeypatch.setattr("sys.stdout", printed)
    with guarded_output():
        assert (await call(request("prints", {"n": 10_000_000}))).content == "printed"
        print("the worker itself is not bounded")  # noqa: T201
    text = printed.getvalue()
    assert text.startswith("x" * MAX_PRINTED_CHARS + "\n[tool 'prints' printed over 64,000")
    assert text.endswith("rest dropped]\nthe worker itself is not bounded\n")
