"""The calls of one turn, of tools and of sub-agents, made in parallel, each once it may be.

A tool call is an activity, scheduled again where its worker was lost; that of a remote activity is
the activity itself. A sub-agent's is a job of its
own, a child workflow, within what is left of the caller's limits; what it has used is counted as
the caller's, however it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta

from pydantic_core import to_json
from temporalio import workflow
from temporalio.common import RawValue
from temporalio.exceptions import ActivityError, ChildWorkflowError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from contracts.agent import AgentSpec, OnFailure, SubAgent, ToolRef
    from contracts.job import AgentJobInput, AgentJobResult
    from contracts.limit import INLINE_RESULT_BYTES
    from contracts.message import content_hash
    from contracts.name import AGENT_WORKFLOW, CALL_TOOL, KEEP_RESULT, TASK
    from contracts.tool import (
        CallToolInput,
        CallToolResult,
        KeepResultInput,
        KeptResult,
        ToolOutcome,
    )
    from workflows import failure, limit, option, text
    from workflows.approval import Approvals
    from workflows.failure import OutOfTimeError
    from workflows.hold import Hold
    from workflows.remote import RemoteResultError, remote_answer
    from workflows.state import JobState, OpenCall

MAX_PARENT_CHARS = 140
"""How much of a job's id stands in those of its sub-agents, which have a limit too."""

MAX_RESCHEDULES = 3
"""How often a tool call that lost its worker in every attempt is scheduled again."""


class Caller:
    """Makes the open calls of a job.

    `time_left` returns the wall time that is left, or raises `OutOfTimeError`; nothing is scheduled
    once `is_rolling_over` says so.
    """

    def __init__(
        self,
        job: AgentJobInput,
        state: JobState,
        hold: Hold,
        *,
        tell: Callable[[], None],
        time_left: Callable[[], timedelta],
        is_rolling_over: Callable[[], bool],
    ) -> None:
        self._job = job
        self._state = state
        self._hold = hold
        self._approvals = Approvals(job, state, hold, time_left=time_left, tell=tell)
        self._known: dict[str, ToolRef | SubAgent] = {}
        self._time_left = time_left
        self._is_rolling_over = is_rolling_over
        self._is_stopping = False

    async def make(self, calls: Sequence[OpenCall], agent: AgentSpec) -> None:
        """Make `calls` in parallel and note their answers; some may lack one before a roll-over.

        `agent` has its servers' tools pinned.

        The first call that fails the job, or the job's cancellation, cancels and awaits the rest.
        """
        if not calls:
            return
        self._is_stopping = False
        self._hold.split(len(calls))
        self._known = {each.tool_name: each for each in agent.callables}
        asked = sum(isinstance(self._known[each.call.tool], SubAgent) for each in calls)
        tasks = [asyncio.create_task(self._make(each, asked)) for each in calls]
        try:
            await workflow.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            self._is_stopping = True
            self._hold.split(0)
            await cancel_and_wait(tasks)
            raise
        self._is_stopping = True
        self._hold.split(0)
        errors = await cancel_and_wait(tasks)
        self._hold.split(1)
        for error in sorted(errors, key=is_cancelled_exception):
            raise error

    async def _make(self, each: OpenCall, asked: int) -> None:
        await self.make_one(each, self._known[each.call.tool], asked)
        self._hold.end_part()

    async def make_one(self, each: OpenCall, called: ToolRef | SubAgent, asked: int = 1) -> None:
        """Make one call; `asked` sub-agents share what is left.

        It may lack an answer before a roll-over.
        """
        if await self._approvals.lets_through(each, called):
            if isinstance(called, SubAgent):
                await self._ask(each, called, asked)
            else:
                await self._call(each, called)

    async def _call(self, each: OpenCall, tool: ToolRef) -> None:
        """Make one tool call and note what the model reads."""
        call = each.call
        try:
            result = await (
                self._remote(each, tool) if tool.activity else self._attempt(each, tool)
            )
        except (ActivityError, RemoteResultError) as error:
            if is_cancelled_exception(error):
                raise
            if isinstance(error, ActivityError) and self._is_out_of_time(error):
                raise OutOfTimeError from error
            if tool.on_failure is OnFailure.FAIL_JOB:
                # Somebody else's failure may be too large to go with the job's; history has it.
                cause = None if tool.activity else error
                raise failure.tool_failure(tool, error) from cause
            each.answer = f"error: {failure.tool_cause(tool, error)}"
            self._state.count_answer(call.tool, ToolOutcome.ERROR, each.answer)
            return
        if result is not None:
            each.answer, each.blob, each.outcome = result.content, result.blob, result.outcome
            self._state.count_answer(call.tool, result.outcome, result.content)

    async def _attempt(self, each: OpenCall, tool: ToolRef) -> CallToolResult | None:
        """Schedule one call; again if only its workers were lost and it may be retried.

        Returns None if that is left to the next run.
        """
        most = MAX_RESCHEDULES if tool.retry.max_attempts > 1 else 0
        while True:
            try:
                result: CallToolResult = await workflow.execute_activity(
                    CALL_TOOL,
                    CallToolInput(
                        job_id=workflow.info().workflow_id,
                        call=each.call,
                        tool=tool,
                        tenant=self._job.tenant,
                    ),
                    result_type=CallToolResult,
                    summary=text.call_summary(each.call),
                    **option.call_tool_options(self._job, tool, self._time_left()),
                )
            except ActivityError as error:
                is_unwanted = workflow.cancellation_reason() is not None
                is_spent = each.reschedules >= most
                if is_unwanted or is_spent or not failure.lost_its_worker(error):
                    raise
                each.reschedules += 1
                if not await self._hold.unpaused() or self._is_rolling_over():
                    return None
            else:
                return result

    async def _remote(self, each: OpenCall, tool: ToolRef) -> CallToolResult:
        """Make a call that somebody else's worker runs; it gets the arguments object.

        Raises RemoteResultError for a result that cannot be read.
        """
        assert tool.activity is not None
        started = workflow.now()
        value: RawValue = await workflow.execute_activity(
            tool.activity.type,
            each.call.arguments,
            activity_id=each.call.id,
            result_type=RawValue,
            summary=text.call_summary(each.call),
            **option.remote_options(self._job, tool, tool.activity, self._time_left()),
        )
        content = remote_answer(tool, value.payload)
        size = len(to_json(content))
        kept = await self._keep(each, content, size) if size > INLINE_RESULT_BYTES else None
        return CallToolResult(
            call_id=each.call.id,
            outcome=ToolOutcome.OK,
            content=kept.preview if kept else content,
            blob=kept.blob if kept else None,
            duration_s=(workflow.now() - started).total_seconds(),
        )

    async def _keep(self, each: OpenCall, content: str, size: int) -> KeptResult:
        """Let the store have a large result, as a tool worker does with its own."""
        remaining = self._time_left()
        try:
            kept: KeptResult = await workflow.execute_activity(
                KEEP_RESULT,
                KeepResultInput(content=content),
                result_type=KeptResult,
                summary=text.summary(f"keep the result of {each.call.tool}"),
                **option.keep_result_options(self._job, remaining),
            )
        except ActivityError as error:
            is_short = remaining <= option.KEEP_RESULT_TIMEOUT
            if is_cancelled_exception(error) or (is_short and failure.ran_out_of_time(error)):
                raise
            raise RemoteResultError(
                f"its result of {size:,} bytes could not be stored: {failure.innermost(error)}"
            ) from error
        return kept

    async def _ask(self, each: OpenCall, sub_agent: SubAgent, asked: int) -> None:
        """Let a sub-agent do its task, and note what the model reads of it."""
        task = each.call.arguments.get(TASK)
        if not isinstance(task, str) or not task.strip():
            each.answer = f"error: {sub_agent.name} takes its {TASK} as text"
            self._state.count_answer(each.call.tool, ToolOutcome.ERROR, each.answer)
            return
        job = self._sub_job(sub_agent, task, asked)
        try:
            result: AgentJobResult = await workflow.execute_child_workflow(
                AGENT_WORKFLOW,
                job,
                id=sub_job_id(workflow.info().workflow_id, each.call.id),
                result_type=AgentJobResult,
                static_summary=text.summary(f"{sub_agent.name}: {job.input}"),
                **option.sub_agent_options(job),
            )
        except ChildWorkflowError as error:
            if spent := failure.spent_by(error):
                self._state.count_sub_agent(spent)
            if is_cancelled_exception(error) and self._is_stopping:
                raise
            if sub_agent.on_failure is OnFailure.FAIL_JOB:
                raise failure.sub_agent_failure(sub_agent, error) from error
            answer, outcome = f"error: {failure.sub_agent_cause(error)}", ToolOutcome.ERROR
        else:
            self._state.count_sub_agent(result)
            answer, outcome = text.sub_agent_answer(result)
        each.answer, each.outcome = answer, outcome
        self._state.count_answer(each.call.tool, outcome, answer)

    def _sub_job(self, sub_agent: SubAgent, task: str, asked: int) -> AgentJobInput:
        limits = limit.narrowed(
            sub_agent.agent.limits,
            self._job.agent.limits,
            self._state,
            callers=asked,
            time_left=self._time_left(),
        )
        return AgentJobInput(
            agent=sub_agent.agent.model_copy(update={"limits": limits}),
            input=task,
            model=sub_agent.agent.model or self._job.model,
            tenant=self._job.tenant,
            priority=self._job.priority,
            deadline=self._job.deadline,
        )

    def _is_out_of_time(self, error: ActivityError) -> bool:
        try:
            self._time_left()
        except OutOfTimeError:
            return True
        return failure.ran_out_of_time(error, has_queue_timeout=True)


def sub_job_id(job_id: str, call_id: str) -> str:
    """Return the id of the job that a call to a sub-agent makes: the same at every replay."""
    return f"{job_id[:MAX_PARENT_CHARS]}-{content_hash(call_id)[:12]}"


async def cancel_and_wait(tasks: Sequence[asyncio.Task[None]]) -> list[BaseException]:
    """Cancel what still runs, wait until all is done, and return the errors, in order.

    Not for a `finally` block: a job that is dropped from memory must not wait there.
    """
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await workflow.wait(running)
    return [error for task in tasks if not task.cancelled() and (error := task.exception())]
