"""`AgentWorkflow`: one agent job, turn by turn, until an answer or a limit.

Life of a job:
1. Check the input; `open_job` stores the opening conversation and pins the toolset.
2. A turn begins if no limit forbids it: `offer` says what the model may do.
3. `llm_step` gets the stored conversation (`base`) and the messages not stored yet (`append`);
   when it has finished, it has stored both and the assistant message.
4. A message without tool calls is the answer: the job is done.
5. Otherwise its calls are made in parallel. Their tool messages, one for each call and in the
   order of the calls, are the next step's `append`; go on at 2.

A limit ends the job with a result that names it; a failure for good fails the job with a typed
error. On cancellation whatever runs is cancelled and awaited, so that its usage is counted. Where
the inference service cannot see that the conversation has ended, it is told, so that it gives up
what it keeps for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import NoReturn

from temporalio import workflow
from temporalio.common import SearchAttributeKey
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    FailureError,
    is_cancelled_exception,
)

with workflow.unsafe.imports_passed_through():
    from contracts.agent import OnFailure, ToolRef
    from contracts.error import MusterError
    from contracts.job import (
        AgentJobInput,
        AgentJobResult,
        JobProgress,
        JobStatus,
        OpenJobInput,
        OpenJobResult,
        StopReason,
    )
    from contracts.llm_step import (
        Hints,
        LLMStepInput,
        LLMStepResult,
        Outcome,
        OutputForm,
        SessionHint,
        SessionState,
    )
    from contracts.message import Message, Role, ToolCall
    from contracts.name import (
        AGENT_WORKFLOW,
        CALL_TOOL,
        LLM_STEP,
        OPEN_JOB,
        PROGRESS_QUERY,
        SEARCH_STATE,
        SESSION_HINT,
    )
    from contracts.tool import CallToolInput, CallToolResult, ToolOutcome
    from workflows import failure, limit, option, text, turn
    from workflows.failure import OutOfTimeError
    from workflows.offer import offer
    from workflows.state import JobState

MAX_RESCHEDULES = 3
"""How often a tool call that lost its worker in every attempt is scheduled again."""

_HINTS = "session-hint"
"""Patch: jobs of before it end without a hint."""

_STATE = SearchAttributeKey.for_keyword(SEARCH_STATE)


@workflow.defn(name=AGENT_WORKFLOW)
class AgentWorkflow:
    """One job of one agent; the workflow id is the job id."""

    @workflow.init
    def __init__(self, job: AgentJobInput) -> None:
        info = workflow.info()
        self._job = job
        self._agent = job.agent
        self._state = JobState(
            branch=info.run_id.rpartition("-")[2],
            deadline=info.workflow_start_time + job.agent.limits.max_wall_time,
        )

    @workflow.run
    async def run(self, job: AgentJobInput) -> AgentJobResult:
        """Run the job to its answer or to a limit.

        Fails with an `ApplicationError` whose type names the kind and whose first detail, if any,
        is a hint.
        """
        self._enter(JobStatus.RUNNING, "opening the job")
        try:
            result = await self._converse()
        except (ActivityError, ApplicationError, MusterError, asyncio.CancelledError) as error:
            is_asked = workflow.cancellation_reason() is not None
            if is_asked or not isinstance(error, asyncio.CancelledError):
                await self._hint_end()
            self._end_badly(error)
        if result.stop_reason is StopReason.ANSWERED:
            self._enter(JobStatus.COMPLETED, "answered")
        else:
            await self._hint_end()
            self._enter(JobStatus.STOPPED, f"stopped: {result.stop_reason} reached")
        return result

    @workflow.query(name=PROGRESS_QUERY)
    def progress(self) -> JobProgress:
        """Return what the job is doing now."""
        return self._state.progress()

    async def _converse(self) -> AgentJobResult:
        """Take turns until an answer or a limit."""
        limit.check_input(workflow.info().workflow_id, self._job)
        try:
            await self._open()
            while True:
                stop = limit.reached(self._agent.limits, self._state, workflow.now())
                result = self._state.result(stop) if stop else await self._turn()
                if result:
                    return result
        except OutOfTimeError:
            return self._state.result(StopReason.MAX_WALL_TIME)

    async def _open(self) -> None:
        """Store the opening conversation; the input itself waits for the first LLM step."""
        remaining = self._remaining()
        try:
            opened = await workflow.execute_activity(
                OPEN_JOB,
                OpenJobInput(job_id=workflow.info().workflow_id, agent=self._agent),
                result_type=OpenJobResult,
                summary=text.summary(f"open job of agent {self._agent.name}"),
                **option.open_job_options(self._job, remaining),
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            is_short = remaining <= option.OPEN_JOB_TIMEOUT
            if is_short and failure.ran_out_of_time(error):
                raise OutOfTimeError from error
            raise failure.open_job_failure(error) from error
        self._state.context = opened.context
        self._state.toolset = opened.toolset
        self._state.pending = [Message(role=Role.USER, content=self._job.input)]

    async def _turn(self) -> AgentJobResult | None:
        """Take one turn: an LLM step, then its tool calls. Return the job's result if it ends."""
        form = offer(self._agent, self._state)
        message = await self._llm_step(form)
        if message.tool_calls:
            return await self._answer_calls(message.tool_calls, form)
        if form.may_answer:
            return self._state.result(StopReason.ANSWERED, message.content)
        self._state.is_out = True
        self._state.pending = [turn.answer_refused(form)]
        return None

    async def _llm_step(self, form: OutputForm) -> Message:
        """Make one LLM step and return the assistant message it committed."""
        state, number = self._state, self._state.next_step
        step = LLMStepInput(
            step_id=state.take_step_id(workflow.info().workflow_id),
            job_id=workflow.info().workflow_id,
            model=self._job.model,
            base=state.context,
            append=tuple(state.pending),
            toolset=state.toolset,
            output=form,
            sampling=self._agent.sampling,
            hints=Hints(
                priority=self._job.priority,
                attained_s=state.attained_s,
                tenant=self._job.tenant,
                deadline=self._job.deadline,
            ),
        )
        self._say(f"waiting for LLM step {number}")
        options = option.llm_step_options(
            self._job, self._remaining(), is_first=state.llm_steps == 0
        )
        try:
            result = await workflow.execute_activity(
                LLM_STEP,
                step,
                result_type=LLMStepResult,
                summary=text.step_summary(number, form),
                **options,
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            if self._is_out_of_time(error):
                raise OutOfTimeError from error
            state.is_out = False
            raise failure.step_failure(step.step_id, error) from error
        return self._accept(step.step_id, result)

    def _accept(self, step_id: str, result: LLMStepResult) -> Message:
        """Account for a step that returned, and move on to the conversation it committed."""
        self._state.count_step(result)
        self._state.is_out = result.message is not None and bool(result.message.tool_calls)
        if workflow.cancellation_reason() is not None:
            raise asyncio.CancelledError
        if result.outcome is not Outcome.FINISHED:
            raise failure.protocol_failure(step_id, f"outcome {result.outcome} without being asked")
        if result.message is None or result.context is None:
            raise failure.protocol_failure(step_id, "no message, though it has finished")
        self._state.advance(result.context)
        return result.message

    async def _answer_calls(
        self, calls: Sequence[ToolCall], form: OutputForm
    ) -> AgentJobResult | None:
        """Answer every call with one tool message; return a result if a limit forbids the calls."""
        plan = turn.plan_calls(calls, form, self._agent, self._state)
        makes = [item for item in plan if isinstance(item, turn.MakeCall)]
        if self._state.tool_calls + len(makes) > self._agent.limits.max_tool_calls:
            return self._state.result(StopReason.MAX_TOOL_CALLS)
        for make in makes:
            self._state.count_call(make.call.tool)
        if makes:
            names = text.one_line(", ".join(make.call.tool for make in makes))
            self._say(f"calling {len(makes)} tool{'s' if len(makes) > 1 else ''}: {names}")
        answers = iter(await self._call_all(makes))
        self._state.pending = turn.fit(
            [
                next(answers)
                if isinstance(item, turn.MakeCall)
                else turn.tool_message(item.call, item.error)
                for item in plan
            ]
        )
        return None

    async def _call_all(self, makes: Sequence[turn.MakeCall]) -> list[Message]:
        """Make all calls in parallel and return their tool messages, in the order of `makes`.

        The first call that fails the job, or the job's cancellation, cancels and awaits the rest.
        """
        if not makes:
            return []
        tasks = [asyncio.create_task(self._call(make.call, make.tool)) for make in makes]
        try:
            await workflow.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            await _cancel_and_wait(tasks)
            raise
        errors = await _cancel_and_wait(tasks)
        for error in sorted(errors, key=is_cancelled_exception):
            raise error
        return [task.result() for task in tasks]

    async def _call(self, call: ToolCall, tool: ToolRef) -> Message:
        """Make one tool call and return the message that answers it."""
        try:
            result = await self._attempt(call, tool)
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            if self._is_out_of_time(error, has_queue_timeout=True):
                raise OutOfTimeError from error
            if tool.on_failure is OnFailure.FAIL_JOB:
                raise failure.tool_failure(tool, error) from error
            content = f"error: {failure.tool_cause(tool, error)}"
            self._state.count_answer(call.tool, ToolOutcome.ERROR, content)
            return turn.tool_message(call, content)
        self._state.count_answer(call.tool, result.outcome, result.content)
        return turn.tool_message(call, result.content, result.blob)

    async def _attempt(self, call: ToolCall, tool: ToolRef) -> CallToolResult:
        """Schedule one tool call; again if only its workers were lost and it may be retried."""
        reschedules = MAX_RESCHEDULES if tool.retry.max_attempts > 1 else 0
        while True:
            try:
                result: CallToolResult = await workflow.execute_activity(
                    CALL_TOOL,
                    CallToolInput(job_id=workflow.info().workflow_id, call=call, tool=tool),
                    result_type=CallToolResult,
                    summary=text.call_summary(call),
                    **option.call_tool_options(self._job, tool, self._remaining()),
                )
            except ActivityError as error:
                is_unwanted = workflow.cancellation_reason() is not None
                if is_unwanted or reschedules == 0 or not failure.lost_its_worker(error):
                    raise
                reschedules -= 1
            else:
                return result

    async def _hint_end(self) -> None:
        """Tell the inference service that the job ends, unless it knows; it may not be there."""
        if not self._state.is_out or not workflow.patched(_HINTS):
            return
        hint = SessionHint(job_id=workflow.info().workflow_id, state=SessionState.ENDED)
        try:
            await workflow.execute_activity(
                SESSION_HINT,
                hint,
                summary=text.summary("tell the inference service that the job has ended"),
                **option.session_hint_options(self._job),
            )
        except (ActivityError, asyncio.CancelledError):
            workflow.logger.info("the inference service was not told of the job's end")

    def _remaining(self) -> timedelta:
        """Return the wall time that is left, above zero; raises `OutOfTimeError` if none is."""
        remaining = self._state.deadline - workflow.now()
        if remaining <= timedelta(0):
            raise OutOfTimeError
        return remaining

    def _is_out_of_time(self, error: ActivityError, *, has_queue_timeout: bool = False) -> bool:
        if workflow.now() >= self._state.deadline:
            return True
        return failure.ran_out_of_time(error, has_queue_timeout=has_queue_timeout)

    def _say(self, doing: str) -> None:
        """Tell people what the job does now: the query and the current details of the UI."""
        self._state.doing = doing
        workflow.set_current_details(text.details(self._agent, self._state))

    def _enter(self, status: JobStatus, doing: str) -> None:
        """Enter a state that people search for."""
        self._say(doing)
        workflow.upsert_search_attributes([_STATE.value_set(status.value)])

    def _end_badly(self, error: BaseException) -> NoReturn:
        """End the job cancelled if that was asked for, else failed with `error`."""
        if workflow.cancellation_reason() is not None:
            self._enter(JobStatus.CANCELLED, "cancelled")
            raise asyncio.CancelledError from error
        if isinstance(error, asyncio.CancelledError):
            raise error
        message = error.message if isinstance(error, MusterError | FailureError) else str(error)
        self._enter(JobStatus.FAILED, text.one_line(f"failed: {message}"))
        if isinstance(error, MusterError):
            raise failure.refusal(error) from error
        raise error


async def _cancel_and_wait(tasks: Sequence[asyncio.Task[Message]]) -> list[BaseException]:
    """Cancel what still runs, wait until all is done, and return the errors, in order.

    Not for a `finally` block: a job that is dropped from memory must not wait there.
    """
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await workflow.wait(running)
    return [error for task in tasks if not task.cancelled() and (error := task.exception())]
