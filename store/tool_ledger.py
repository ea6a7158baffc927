"""The ledger of tool calls: one row per attempt, and the one result a call keeps for ever.

The same rules as for LLM steps: claiming makes the next attempt and abandons a running one, a
finished call is answered from its row, a late result of an abandoned attempt is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from contracts.error import BadInputError
from contracts.message import ToolCall, content_hash
from contracts.tool import CallToolResult
from store.attempt import MAX_ERROR_CHARS, AttemptOutcome
from store.database import Database, storable
from store.schema import tool_ledger


class ToolCallChangedError(BadInputError):
    """A tool call id was used again with another call; no retry can mend that."""


@dataclass(frozen=True, slots=True)
class ToolClaimed:
    """The call is the caller's to run, as `attempt` (1 is the first).

    `failures` counts earlier attempts that failed, `lost` those that ended with nobody to say how
    (their worker was killed, or they timed out); the two have different limits.
    """

    attempt: int
    failures: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True)
class ToolFinished:
    """The call has its result; the tool must not run again."""

    result: CallToolResult


@dataclass(frozen=True, slots=True)
class ToolAttempt:
    """One row of the ledger."""

    call_id: str
    attempt: int
    outcome: AttemptOutcome
    error: str
    claimed_at: datetime
    ended_at: datetime | None


_RUNNING = AttemptOutcome.RUNNING.value
_FINISHED = AttemptOutcome.FINISHED.value
_ABANDONED = AttemptOutcome.ABANDONED.value

_table = tool_ledger.c
_of_call = _table.call_id == sa.bindparam("at_call")
_at_row = _of_call & (_table.attempt == sa.bindparam("at_attempt"))

_CLAIM_FIRST = (
    insert(tool_ledger)
    .values(attempt=1, outcome=_RUNNING)
    .on_conflict_do_nothing()
    .returning(_table.attempt)
)
_CLAIM_NEXT = insert(tool_ledger).values(outcome=_RUNNING)
_LOCK_CALL = sa.select(_table.digest).where(_of_call & (_table.attempt == 1)).with_for_update()
_READ_CALL = sa.select(tool_ledger).where(_of_call).order_by(_table.attempt)
_ABANDON = (
    sa.update(tool_ledger)
    .where(_of_call & (_table.outcome == _RUNNING))
    .values(outcome=_ABANDONED, ended_at=sa.func.now())
)
_CLOSE = (
    sa.update(tool_ledger)
    .where(_at_row & (_table.outcome == _RUNNING))
    .values(
        outcome=sa.bindparam("closed_as"),
        error=sa.bindparam("why"),
        result=sa.bindparam("result_json"),
        blob=sa.bindparam("result_blob"),
        ended_at=sa.func.now(),
    )
    .returning(_table.attempt)
)
_READ_OUTCOME = sa.select(_table.outcome).where(_at_row)


class ToolLedger:
    """Claims and ends attempts at tool calls; each call is one transaction and safe to repeat."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def claim(
        self, *, job_id: str, call: ToolCall, claim_token: bytes
    ) -> ToolClaimed | ToolFinished:
        """Start the next attempt at a call, or return the result it already has.

        `claim_token` names the caller's attempt (Temporal's task token): the same one again is
        the same claim. Raises ToolCallChangedError if the call id came with another call.
        """
        row = {
            "call_id": call.id,
            "job_id": job_id,
            "tool": call.tool,
            "digest": content_hash({"job_id": job_id, "call": call.model_dump(mode="json")}),
            "claim_token": claim_token,
        }
        if await self._database.fetch(_CLAIM_FIRST, row):
            return ToolClaimed(1)
        return await self._database.transact(lambda connection: _claim_again(connection, row))

    async def commit(self, attempt: int, result: CallToolResult) -> bool:
        """Keep the call's result for ever; False if a later attempt has taken the call over."""
        closed = await self._close(result.call_id, attempt, AttemptOutcome.FINISHED, "", result)
        if closed:
            return True
        at_row = {"at_call": result.call_id, "at_attempt": attempt}
        rows = await self._database.fetch(_READ_OUTCOME, at_row)
        return bool(rows) and rows[0].outcome == _FINISHED

    async def fail(
        self,
        call_id: str,
        attempt: int,
        error: str,
        outcome: AttemptOutcome = AttemptOutcome.FAILED,
    ) -> None:
        """End an attempt without a result (FAILED, CANCELLED, HANDED_BACK)."""
        assert outcome not in (AttemptOutcome.RUNNING, AttemptOutcome.FINISHED)
        await self._close(call_id, attempt, outcome, storable(error, MAX_ERROR_CHARS), None)

    async def _close(
        self,
        call_id: str,
        attempt: int,
        outcome: AttemptOutcome,
        error: str,
        result: CallToolResult | None,
    ) -> Sequence[sa.Row[Any]]:
        return await self._database.fetch(
            _CLOSE,
            {
                "at_call": call_id,
                "at_attempt": attempt,
                "closed_as": outcome.value,
                "why": error,
                "result_json": result.model_dump_json() if result else None,
                "result_blob": result.blob.digest if result and result.blob else None,
            },
        )

    async def attempts(self, call_id: str) -> list[ToolAttempt]:
        """Return all attempts at a call, first to last."""
        rows = await self._database.fetch(_READ_CALL, {"at_call": call_id})
        return [
            ToolAttempt(
                row.call_id,
                row.attempt,
                AttemptOutcome(row.outcome),
                row.error,
                row.claimed_at,
                row.ended_at,
            )
            for row in rows
        ]


async def _claim_again(
    connection: AsyncConnection, row: dict[str, Any]
) -> ToolClaimed | ToolFinished:
    """Claim a call that has attempts already, in the transaction of `connection`."""
    of_call = {"at_call": row["call_id"]}
    digest = (await connection.execute(_LOCK_CALL, of_call)).scalar_one()
    if digest != row["digest"]:
        raise ToolCallChangedError(
            f"tool call {row['call_id']!r} was made before with another tool, job or arguments",
            hint="a tool call id names one call for ever; it is also the idempotency key",
        )
    earlier = (await connection.execute(_READ_CALL.with_for_update(), of_call)).all()
    for attempt in earlier:
        if attempt.outcome == _FINISHED:
            return ToolFinished(CallToolResult.model_validate_json(attempt.result))
    last = earlier[-1]
    outcomes = [attempt.outcome for attempt in earlier]
    failures = outcomes.count(AttemptOutcome.FAILED.value)
    lost = outcomes.count(_ABANDONED)
    if last.outcome == _RUNNING and last.claim_token == row["claim_token"]:
        return ToolClaimed(last.attempt, failures, lost)
    await connection.execute(_ABANDON, of_call)
    await connection.execute(_CLAIM_NEXT, {**row, "attempt": last.attempt + 1})
    return ToolClaimed(last.attempt + 1, failures, lost + (last.outcome == _RUNNING))
