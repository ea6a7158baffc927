"""The `call_tool` activity: one attempt at one tool call.

1. Claim the call in the tool ledger; a finished call is answered from there.
2. Load the tool and bind the model's arguments to it, which may not fit.
3. Run it, bounded in time, with the call's id as idempotency key if it takes one.
4. Make its result text, bounded in size; or say whose fault its error is (`error_map`). Secrets
   are taken out of either. A text over `INLINE_RESULT_BYTES` goes to the store, and only its name
   and a preview go on.
5. Record the outcome, then return it, or raise what Temporal shall retry or fail with.

The ledger counts failures, not Temporal: a worker killed in the middle of a call has cost an
attempt of Temporal's, yet it was no failure of the tool.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from temporalio import activity

from activities.error_map import (
    FailureKind,
    ToolFailure,
    application_error,
    bounded,
    classify,
    tool_error,
    trace,
)
from activities.execution import ToolExecution
from activities.metric import record_attempt
from activities.output import output_of
from activities.result import Rendered
from activities.tool import WrongArgumentsError
from activities.toolbox import Toolbox
from contracts.agent import OnFailure
from contracts.error import MusterError, UnavailableError
from contracts.limit import INLINE_RESULT_BYTES
from contracts.message import BlobRef
from contracts.name import CALL_TOOL
from contracts.tool import CallToolInput, CallToolResult, ToolOutcome
from store.attempt import AttemptOutcome
from store.context import ContextStore
from store.database import Database
from store.tool_ledger import ToolClaimed, ToolFinished, ToolLedger

HEARTBEAT_INTERVAL_S = 5.0
"""A call that is over sooner costs the server no heartbeat."""

MAX_LOST_ATTEMPTS = 10
"""Attempts whose worker was lost before a call counts as what kills its workers."""

CLOSE_TIMEOUT_S = 2.0
"""How long a cancelled call tries to record its end; the next claim does it otherwise."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a call came to: the text, or the preview of the text that the store keeps as `blob`."""

    content: str
    blob: BlobRef | None = None


class CallTool:
    """Runs tool calls on behalf of workflows."""

    def __init__(self, database: Database, toolbox: Toolbox) -> None:
        self._ledger = ToolLedger(database)
        self._contexts = ContextStore(database)
        self._toolbox = toolbox
        self._scrub = toolbox.secrets.scrub
        self._execution = ToolExecution()

    @activity.defn(name=CALL_TOOL)
    async def call_tool(self, request: CallToolInput) -> CallToolResult:
        """Run a tool once and return what the model reads.

        Raises ApplicationError: retryable for a transient failure with attempts left, else not.
        """
        try:
            claim = await self._ledger.claim(
                job_id=request.job_id, call=request.call, claim_token=activity.info().task_token
            )
            if isinstance(claim, ToolFinished):
                return claim.result
            return await self._attempt(request, claim)
        except MusterError as error:
            raise application_error(error, self._scrub) from None

    async def _attempt(self, request: CallToolInput, claim: ToolClaimed) -> CallToolResult:
        started = time.monotonic()
        try:
            async with _heartbeats():
                outcome = await self._run(request, claim)
        except asyncio.CancelledError:
            record_attempt(request.call.tool, "cancelled", time.monotonic() - started)
            await self._close_cancelled(request, claim)
            raise
        duration_s = time.monotonic() - started
        ended_as = ToolOutcome.OK if isinstance(outcome, _Answer) else outcome.kind
        record_attempt(request.call.tool, ended_as.value, duration_s)
        if isinstance(outcome, _Answer):
            return await self._commit(request, claim, ToolOutcome.OK, outcome, duration_s)
        failure = _settle(request, claim, outcome)
        if failure.kind is FailureKind.MODEL or (
            failure.kind is FailureKind.PERMANENT
            and request.tool.on_failure is OnFailure.TELL_MODEL
        ):
            text = failure.text if failure.text.startswith("error: ") else f"error: {failure.text}"
            told = _Answer(text)
            return await self._commit(request, claim, ToolOutcome.ERROR, told, duration_s)
        await self._ledger.fail(request.call.id, claim.attempt, failure.text)
        raise tool_error(failure)

    async def _run(self, request: CallToolInput, claim: ToolClaimed) -> _Answer | ToolFailure:
        """Return the result, or whose fault it is that there is none."""
        name = request.call.tool
        if claim.lost >= MAX_LOST_ATTEMPTS:
            lost = f"its worker was lost {claim.lost} times while it ran"
            return ToolFailure(FailureKind.PERMANENT, f"{lost}, the limit is {MAX_LOST_ATTEMPTS}")
        try:
            tool = await self._toolbox.load(request.tool, request.tenant)
            work = tool.bind(request.call.arguments, request.call.id)
        except WrongArgumentsError as error:
            return ToolFailure(FailureKind.MODEL, bounded(self._scrub(str(error))))
        except Exception as error:
            return self._failure(name, error)
        timeout_s = request.tool.timeout.total_seconds()
        with output_of(name):
            ended = await self._execution.call(tool, work, timeout_s)
            if ended.error is None:
                size = request.tool.max_result_bytes
                ended = await self._execution.render(
                    name, ended.value, size, timeout_s, self._scrub
                )
        if ended.error is None:
            return await self._answer(ended.value)
        return self._failure(name, ended.error)

    def _failure(self, name: str, error: BaseException) -> ToolFailure:
        """Return whose fault an error is; one that is not of ours goes to the log, with a trace."""
        failure = classify(error, self._scrub)
        if not isinstance(error, MusterError):
            level = logging.ERROR if failure.kind is FailureKind.PERMANENT else logging.WARNING
            _log.log(level, "tool %r failed: %s", name, trace(error, self._scrub))
        return failure

    async def _answer(self, result: Rendered) -> _Answer:
        if result.bytes <= INLINE_RESULT_BYTES:
            return _Answer(result.text)
        return _Answer(result.preview(), await self._contexts.put_text(result.text))

    async def _commit(
        self,
        request: CallToolInput,
        claim: ToolClaimed,
        outcome: ToolOutcome,
        answer: _Answer,
        duration_s: float,
    ) -> CallToolResult:
        result = CallToolResult(
            call_id=request.call.id,
            outcome=outcome,
            content=answer.content,
            blob=answer.blob,
            duration_s=duration_s,
        )
        if not await self._ledger.commit(claim.attempt, result):
            _log.warning("late result of tool call %r dropped", request.call.id)
        return result

    async def _close_cancelled(self, request: CallToolInput, claim: ToolClaimed) -> None:
        """Record the end of a cancelled attempt; when the worker stops, hand the call back."""
        details = activity.cancellation_details()
        is_shutdown = details is not None and details.worker_shutdown
        is_asked = details is not None and details.cancel_requested
        outcome = AttemptOutcome.CANCELLED if is_asked else AttemptOutcome.ABANDONED
        if is_shutdown:
            outcome = AttemptOutcome.HANDED_BACK
        with contextlib.suppress(MusterError, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._ledger.fail(request.call.id, claim.attempt, "", outcome)
        if is_shutdown:
            raise UnavailableError("the tool worker stops; another one takes the call over")


def _settle(request: CallToolInput, claim: ToolClaimed, failure: ToolFailure) -> ToolFailure:
    """Return the failure, made permanent if it was the last that the policy allows."""
    attempts, limit = claim.failures + 1, request.tool.retry.max_attempts
    if failure.kind is not FailureKind.TRANSIENT or attempts < limit:
        return failure
    text = f"{failure.text} (gave up after {attempts} attempts)"
    return replace(failure, kind=FailureKind.PERMANENT, text=text)


@contextlib.asynccontextmanager
async def _heartbeats() -> AsyncIterator[None]:
    async def beat() -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            activity.heartbeat()

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()
