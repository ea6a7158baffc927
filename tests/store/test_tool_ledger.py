"""A tool call has one result for ever, and its lost and failed attempts are counted apart."""

from __future__ import annotations

import asyncio

import pytest

from contracts.message import ToolCall
from contracts.tool import CallToolResult, ToolOutcome
from store.database import Database
from store.step_ledger import AttemptOutcome
from store.tool_ledger import ToolCallChangedError, ToolClaimed, ToolFinished, ToolLedger

CALL = ToolCall(id="job-1/b/1/0", tool="pay", arguments={"amount": 5})


def _result(content: str = "paid") -> CallToolResult:
    return CallToolResult(call_id=CALL.id, outcome=ToolOutcome.OK, content=content, duration_s=0.5)


async def _claim(
    ledger: ToolLedger, token: bytes, call: ToolCall = CALL
) -> ToolClaimed | ToolFinished:
    return await ledger.claim(job_id="job-1", call=call, claim_token=token)


async def test_finished_call_is_answered_from_the_ledger(database: Database) -> None:
    ledger = ToolLedger(database)
    assert await _claim(ledger, b"a") == ToolClaimed(1)
    assert await ledger.commit(1, _result())
    assert await ledger.commit(1, _result())
    assert await _claim(ledger, b"b") == ToolFinished(_result())


async def test_same_id_with_another_call_is_refused(database: Database) -> None:
    ledger = ToolLedger(database)
    await _claim(ledger, b"a")
    other = CALL.model_copy(update={"arguments": {"amount": 6}})
    with pytest.raises(ToolCallChangedError, match="was made before with another"):
        await _claim(ledger, b"b", other)
    with pytest.raises(ToolCallChangedError):
        await ledger.claim(job_id="job-2", call=CALL, claim_token=b"c")


async def test_lost_and_failed_attempts_are_counted_apart(database: Database) -> None:
    ledger = ToolLedger(database)
    await _claim(ledger, b"1")
    assert await _claim(ledger, b"2") == ToolClaimed(2, failures=0, lost=1)
    await ledger.fail(CALL.id, 2, "503 \x00")
    assert await _claim(ledger, b"3") == ToolClaimed(3, failures=1, lost=1)
    assert await _claim(ledger, b"3") == ToolClaimed(3, failures=1, lost=1)
    await ledger.fail(CALL.id, 3, "", AttemptOutcome.HANDED_BACK)
    assert await _claim(ledger, b"4") == ToolClaimed(4, failures=1, lost=1)
    rows = await ledger.attempts(CALL.id)
    assert [row.outcome.value for row in rows] == ["abandoned", "failed", "handed_back", "running"]


async def test_late_result_of_an_older_attempt_is_dropped(database: Database) -> None:
    ledger = ToolLedger(database)
    await _claim(ledger, b"1")
    await _claim(ledger, b"2")
    assert not await ledger.commit(1, _result("late"))
    assert await ledger.commit(2, _result("good"))
    assert not await ledger.commit(1, _result("late"))
    assert await _claim(ledger, b"3") == ToolFinished(_result("good"))


async def test_claims_at_once_get_different_attempts(database: Database) -> None:
    ledger = ToolLedger(database)
    claims = await asyncio.gather(*(_claim(ledger, bytes([number])) for number in range(8)))
    assert sorted(c.attempt for c in claims if isinstance(c, ToolClaimed)) == list(range(1, 9))
    rows = await ledger.attempts(CALL.id)
    assert [row.outcome.value for row in rows] == ["abandoned"] * 7 + ["running"]
