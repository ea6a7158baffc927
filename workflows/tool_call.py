"""The tool calls of one turn, made in parallel, and again where a worker was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from contracts.agent import OnFailure, ToolRef
    from contracts.job import AgentJobInput
    from contracts.name import CALL_TOOL
    from contracts.tool import CallToolInput, CallToolResult, ToolOutcome
    from workflows import failure, option, text
    from workflows.failure import OutOfTimeError
    from workflows.state import JobState, OpenCall

MAX_RESCHEDULES = 3
"""How often a tool call that lost its worker in every attempt is scheduled again."""


class ToolCaller:
    """Makes the open calls of a job.

    `time_left` returns the wall time that is left, or raises `OutOfTimeError`; nothing is scheduled
    once `is_rolling_over` says so.
    """

    def __init__(
        self,
        job: AgentJobInput,
        state: JobState,
        *,
        time_left: Callable[[], timedelta],
        is_rolling_over: Callable[[], bool],
    ) -> None:
        self._job = job
        self._state = state
        self._tools = {tool.tool_name: tool for tool in job.agent.tools}
        self._time_left = time_left
        self._is_rolling_over = is_rolling_over

    async def make(self, calls: Sequence[OpenCall]) -> None:
        """Make `calls` in parallel and note their answers; some may lack one before a roll-over.

        The first call that fails the job, or the job's cancellation, cancels and awaits the rest.
        """
        if not calls:
            return
        tasks = [asyncio.create_task(self._call(each)) for each in calls]
        try:
            await workflow.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            await _cancel_and_wait(tasks)
            raise
        errors = await _cancel_and_wait(tasks)
        for error in sorted(errors, key=is_cancelled_exception):
            raise error

    async def _call(self, each: OpenCall) -> None:
        """Make one call and note what the model reads."""
        call, tool = each.call, self._tools[each.call.tool]
        try:
            result = await self._attempt(each, tool)
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            if self._is_out_of_time(error):
                raise OutOfTimeError from error
            if tool.on_failure is OnFailure.FAIL_JOB:
                raise failure.tool_failure(tool, error) from error
            each.answer = f"error: {failure.tool_cause(tool, error)}"
            self._state.count_answer(call.tool, ToolOutcome.ERROR, each.answer)
            return
        if result is not None:
            each.answer = result.content
            self._state.count_answer(call.tool, result.outcome, result.content)

    async def _attempt(self, each: OpenCall, tool: ToolRef) -> CallToolResult | None:
        """Schedule one call; again if only its workers were lost and it may be retried.

        Returns None if that is left to the next run.
        """
        limit = MAX_RESCHEDULES if tool.retry.max_attempts > 1 else 0
        while True:
            try:
                result: CallToolResult = await workflow.execute_activity(
                    CALL_TOOL,
                    CallToolInput(job_id=workflow.info().workflow_id, call=each.call, tool=tool),
                    result_type=CallToolResult,
                    summary=text.call_summary(each.call),
                    **option.call_tool_options(self._job, tool, self._time_left()),
                )
            except ActivityError as error:
                is_unwanted = workflow.cancellation_reason() is not None
                is_spent = each.reschedules >= limit
                if is_unwanted or is_spent or not failure.lost_its_worker(error):
                    raise
                each.reschedules += 1
                if self._is_rolling_over():
                    return None
            else:
                return result

    def _is_out_of_time(self, error: ActivityError) -> bool:
        try:
            self._time_left()
        except OutOfTimeError:
            return True
        return failure.ran_out_of_time(error, has_queue_timeout=True)


async def _cancel_and_wait(tasks: Sequence[asyncio.Task[None]]) -> list[BaseException]:
    """Cancel what still runs, wait until all is done, and return the errors, in order.

    Not for a `finally` block: a job that is dropped from memory must not wait there.
    """
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await workflow.wait(running)
    return [error for task in tasks if not task.cancelled() and (error := task.exception())]
