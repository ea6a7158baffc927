"""One attempt at a tool call: claimed, run, bounded, recorded, and answered once for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from temporalio.activity import ActivityCancellationDetails
from temporalio.exceptions import ApplicationError

from activities import call_tool as call_tool_module
from activities import execution
from activities.call_tool import CallTool
from contracts.agent import OnFailure
from contracts.tool import ToolOutcome
from store.attempt import AttemptOutcome
from store.database import Database
from store.tool_ledger import ToolLedger
from tests.activities.conftest import GOOD, Caller, HttpServer, environment, request
from tests.activities.good_tool import GATES, Gate, gate_named

CALL_ID = "job-1/b/1/0"
DEADLINE_S = 10.0


async def _outcomes(database: Database) -> list[str]:
    return [row.outcome.value for row in await ToolLedger(database).attempts(CALL_ID)]


async def _set(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, DEADLINE_S)


@pytest.fixture
def gate(request: pytest.FixtureRequest) -> Iterator[Gate]:
    with gate_named(request.node.name) as found:
        yield found


def _gate_name(gate: Gate) -> str:
    return next(name for name, found in GATES.items() if found is gate)


@pytest.mark.parametrize(
    ("function", "arguments", "content"),
    [
        ("shout", {"text": "olá"}, "OLÁ"),
        ("wrapped", {"text": "hi"}, "HI"),
        ("greet", {"name": "Ada"}, "hello Ada"),
        ("nothing", {}, "null"),
        (
            "forecast",
            {"place": {"city": "Évora"}, "day": "2026-12-01"},
            '{"place":{"city":"Évora","country":"PT"},"day":"2026-12-01","high":21.5}',
        ),
        ("pay", {"amount": "7"}, f'{{"amount":7,"key":"{CALL_ID}"}}'),
    ],
)
async def test_result_is_text_or_compact_json(
    call: Caller, function: str, arguments: dict[str, Any], content: str
) -> None:
    result = await call(request(function, arguments, module=GOOD))
    assert (result.outcome, result.content) == (ToolOutcome.OK, content)
    assert result.call_id == CALL_ID


async def test_finished_call_is_answered_from_the_ledger_and_not_run_again(
    call: Caller, database: Database, http_server: HttpServer
) -> None:
    http_server.answers = ["200 OK\n\nfirst", "200 OK\n\nsecond"]
    get = request("get", {"url": http_server.url}, module=GOOD)
    first = await call(get)
    assert first.content == "first"
    assert await call(get) == first
    assert http_server.requests == 1
    assert await _outcomes(database) == ["finished"]


async def test_wrong_arguments_are_told_to_the_model_whatever_the_policy(
    call: Caller, database: Database
) -> None:
    wrong = request("pay", {"amont": 7}, module=GOOD, on_failure=OnFailure.FAIL_JOB)
    result = await call(wrong)
    assert result.outcome is ToolOutcome.ERROR
    assert result.content.startswith("error: wrong arguments for tool 'pay': amount: Field")
    assert "Expected: {" in result.content
    assert await _outcomes(database) == ["finished"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"amount": "x" * 1_000_000}, "amount: Input should be a valid integer"),
        ({"amount": ["1"] * 100_000}, "amount: Input should be a valid integer"),
        ({"amount": 1, **{f"x{n}": n for n in range(50_000)}}, "Extra inputs are not permitted"),
    ],
)
async def test_a_megabyte_of_arguments_is_one_short_error(
    call: Caller, database: Database, arguments: dict[str, Any], told: str
) -> None:
    result = await call(request("pay", arguments, module=GOOD))
    assert result.outcome is ToolOutcome.ERROR
    assert told in result.content
    assert len(result.content) < 5_000
    assert await _outcomes(database) == ["finished"]


async def test_model_cannot_set_the_idempotency_key(call: Caller) -> None:
    result = await call(request("pay", {"amount": 1, "idempotency_key": "mine"}, module=GOOD))
    assert result.outcome is ToolOutcome.ERROR
    assert "idempotency_key: Extra inputs are not permitted" in result.content


async def test_no_such_customer_is_one_attempt_and_the_models_to_read(
    call: Caller, database: Database
) -> None:
    name = {"name": "Ada"}
    result = await call(request("no_such_customer", name, on_failure=OnFailure.FAIL_JOB))
    assert result.outcome is ToolOutcome.ERROR
    assert result.content == "error: ValueError: no such customer 'Ada'"
    assert await _outcomes(database) == ["finished"]


async def test_http_404_is_one_attempt_and_its_body_reaches_the_model(
    call: Caller, http_server: HttpServer
) -> None:
    http_server.answers = ["404 Not Found\n\nno such customer"]
    get = request("get", {"url": http_server.url}, module=GOOD, on_failure=OnFailure.FAIL_JOB)
    result = await call(get)
    assert result.outcome is ToolOutcome.ERROR
    assert "404 Not Found" in result.content
    assert result.content.endswith("no such customer")
    assert http_server.requests == 1


async def test_503_then_429_are_retried_with_their_delay_and_bounded(
    call: Caller, database: Database, http_server: HttpServer
) -> None:
    http_server.answers = [
        "503 Service Unavailable\n\n",
        "429 Too Many Requests\nRetry-After: 5\n\n",
        "200 OK\n\ndone",
    ]
    get = request("get", {"url": http_server.url}, module=GOOD)
    with pytest.raises(ApplicationError, match="503 Service Unavailable") as first:
        await call(get)
    assert not first.value.non_retryable
    assert first.value.next_retry_delay is None
    with pytest.raises(ApplicationError, match="429 Too Many Requests") as second:
        await call(get)
    assert not second.value.non_retryable
    assert second.value.next_retry_delay == timedelta(seconds=5)
    assert (await call(get)).content == "done"
    assert await _outcomes(database) == ["failed", "failed", "finished"]


@pytest.mark.parametrize("policy", list(OnFailure))
async def test_transient_failures_end_after_the_policys_attempts(
    call: Caller, database: Database, policy: OnFailure
) -> None:
    flaky = request("network", max_attempts=2, on_failure=policy)
    with pytest.raises(ApplicationError) as first:
        await call(flaky)
    assert not first.value.non_retryable
    text = "ConnectionResetError: connection reset by peer (gave up after 2 attempts)"
    if policy is OnFailure.TELL_MODEL:
        assert (await call(flaky)).content == f"error: {text}"
        assert await _outcomes(database) == ["failed", "finished"]
    else:
        with pytest.raises(ApplicationError) as last:
            await call(flaky)
        assert (last.value.message, last.value.non_retryable) == (text, True)
        assert await _outcomes(database) == ["failed", "failed"]


async def test_worker_lost_in_the_middle_costs_none_of_the_policys_attempts(
    call: Caller, database: Database
) -> None:
    ledger, pay = ToolLedger(database), request("pay", {"amount": 5}, module=GOOD, max_attempts=1)
    for number in range(5):
        await ledger.claim(job_id="job-1", call=pay.call, claim_token=f"killed-{number}".encode())
    assert (await call(pay)).content == f'{{"amount":5,"key":"{CALL_ID}"}}'
    assert await _outcomes(database) == ["abandoned"] * 5 + ["finished"]


async def test_call_that_keeps_losing_its_worker_ends_with_a_clear_error(
    call: Caller, database: Database
) -> None:
    ledger, pay = ToolLedger(database), request("pay", {"amount": 5}, module=GOOD)
    for number in range(call_tool_module.MAX_LOST_ATTEMPTS):
        await ledger.claim(job_id="job-1", call=pay.call, claim_token=f"killed-{number}".encode())
    result = await call(pay)
    assert result.content == "error: its worker was lost 10 times while it ran, the limit is 10"


async def test_same_call_id_for_another_call_fails_for_good(call: Caller) -> None:
    await call(request("pay", {"amount": 1}, module=GOOD))
    with pytest.raises(ApplicationError, match="was made before with another") as caught:
        await call(request("pay", {"amount": 2}, module=GOOD))
    assert caught.value.non_retryable
    assert caught.value.type == "ToolCallChangedError"


async def test_tool_that_cannot_be_loaded_follows_the_policy(call: Caller) -> None:
    result = await call(request("nowhere"))
    assert "has no 'nowhere' (hint: it has: " in result.content
    with pytest.raises(ApplicationError, match="has no 'nowhere'") as caught:
        await call(request("nowhere", on_failure=OnFailure.FAIL_JOB, call_id="job-1/b/2/0"))
    assert caught.value.non_retryable


@pytest.mark.parametrize("function", ["wait", "wait_async"])
async def test_tool_over_its_timeout_is_a_transient_failure(
    call: Caller, database: Database, gate: Gate, function: str
) -> None:
    slow = request(
        function, {"gate": _gate_name(gate)}, module=GOOD, timeout=timedelta(milliseconds=200)
    )
    with pytest.raises(ApplicationError, match=r"no answer within 0.2 s") as caught:
        await call(slow)
    assert not caught.value.non_retryable
    assert gate.cancelled.is_set() == (function == "wait_async")
    assert await _outcomes(database) == ["failed"]


async def test_cancellation_is_delivered_to_a_running_async_tool(
    tools: CallTool, database: Database, gate: Gate
) -> None:
    env = environment()
    call_input = request("wait_async", {"gate": _gate_name(gate)}, module=GOOD)
    running = asyncio.ensure_future(env.run(tools.call_tool, call_input))
    await _set(gate.started)
    env.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert gate.cancelled.is_set()
    assert await _outcomes(database) == ["cancelled"]


async def test_thread_of_a_cancelled_sync_tool_is_left_and_its_result_dropped(
    tools: CallTool, database: Database, gate: Gate
) -> None:
    env = environment()
    call_input = request("wait", {"gate": _gate_name(gate)}, module=GOOD)
    running = asyncio.ensure_future(env.run(tools.call_tool, call_input))
    await _set(gate.started)
    env.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    gate.go_on.set()
    assert await _outcomes(database) == ["cancelled"]


async def test_too_many_threads_left_behind_is_a_clear_error(
    tools: CallTool, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "MAX_LEFT_BEHIND", 1)
    slow = {"gate": _gate_name(gate)}
    brief = timedelta(milliseconds=50)
    for number, words in enumerate(["no answer within", "still run after their timeout"]):
        call_input = request(
            "wait", slow, module=GOOD, timeout=brief, call_id=f"job-1/b/{number}/0"
        )
        with pytest.raises(ApplicationError, match=words):
            await environment().run(tools.call_tool, call_input)


async def test_stopping_worker_hands_the_call_back(
    tools: CallTool, database: Database, gate: Gate
) -> None:
    env = environment()
    call_input = request("wait_async", {"gate": _gate_name(gate)}, module=GOOD)
    running = asyncio.ensure_future(env.run(tools.call_tool, call_input))
    await _set(gate.started)
    env.cancel(ActivityCancellationDetails(worker_shutdown=True))
    with pytest.raises(ApplicationError, match="another one takes the call over") as caught:
        await running
    assert not caught.value.non_retryable
    assert await _outcomes(database) == [AttemptOutcome.HANDED_BACK.value]


async def test_only_a_long_call_heartbeats(
    tools: CallTool, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call_tool_module.HEARTBEAT_INTERVAL_S == 5.0
    monkeypatch.setattr(call_tool_module, "HEARTBEAT_INTERVAL_S", 0.02)
    env, beat = environment(), asyncio.Event()
    env.on_heartbeat = lambda *_: beat.set()
    call_input = request("wait", {"gate": _gate_name(gate)}, module=GOOD)
    running = asyncio.ensure_future(env.run(tools.call_tool, call_input))
    async with asyncio.timeout(DEADLINE_S):
        await beat.wait()
    gate.go_on.set()
    assert (await running).content == "waited"


async def test_calls_run_at_the_same_time(tools: CallTool, gate: Gate) -> None:
    slow = request("wait", {"gate": _gate_name(gate)}, module=GOOD)
    running = asyncio.ensure_future(environment().run(tools.call_tool, slow))
    await _set(gate.started)
    quick = request("shout", {"text": "hi"}, module=GOOD, call_id="job-1/b/2/0")
    assert (await environment().run(tools.call_tool, quick)).content == "HI"
    gate.go_on.set()
    assert (await running).content == "waited"
