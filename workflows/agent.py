"""`AgentWorkflow`: one agent job, turn by turn, until an answer or a limit.

Life of a job:
1. Check the input; `open_job` stores the opening conversation and pins the toolset.
2. A turn begins if no limit forbids it: `offer` says what the model may do. Messages that were sent
   to the job meanwhile are read now.
3. `llm_step` gets the stored conversation (`base`) and the messages not stored yet (`append`);
   when it has finished, it has stored both and the assistant message.
4. A message without tool calls is the answer: the job is done, unless a message waits.
5. Otherwise its calls are made in parallel, those that need it once people have approved them.
   Their tool messages, one for each call and in the order of the calls, are the next step's
   `append`; go on at 2.

At a limit the model is asked for a last answer, and the job ends with a result that names the
limit; a failure for good fails the job with a typed error. On cancellation whatever runs is
cancelled and awaited, so that its usage is counted. Where the inference service cannot see that the
conversation has ended, or waits for people alone, it is told, so that it gives up what it keeps.

When the history grows long, the job rolls over: it schedules nothing new, and when nothing runs it
continues as new, with its state; also in the middle of a turn, or while it waits for people.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import NoReturn

from temporalio import workflow
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    is_cancelled_exception,
)

with workflow.unsafe.imports_passed_through():
    from contracts.agent import Sampling
    from contracts.approval import JobWaits
    from contracts.error import MusterError
    from contracts.job import (
        AgentJobResult,
        JobMessage,
        JobStatus,
        OpenJobInput,
        OpenJobResult,
        StopReason,
    )
    from contracts.limit import MAX_APPEND_BYTES
    from contracts.llm_step import OutputForm, SessionState
    from contracts.message import Message, Role, ToolCall
    from contracts.name import (
        AGENT_WORKFLOW,
        MESSAGE_UPDATE,
        OPEN_JOB,
    )
    from workflows import failure, limit, option, text, turn
    from workflows.calling import Caller
    from workflows.failure import LimitReachedError, OutOfTimeError
    from workflows.hold import Hold
    from workflows.job import JobWorkflow, history_is_long
    from workflows.offer import held_back_by, offer
    from workflows.state import AgentRunInput, JobState
    from workflows.stepping import Stepper

_HINTS = "session-hint"
"""Patch: jobs of before it end without a hint."""

_ROLL_OVER = "roll-over"
"""Patch: jobs of before it stay in one run."""

_LAST_ANSWER = "last-answer"
"""Patch: jobs of before it stop at a limit without a last answer, and keep no time back for it."""


@workflow.defn(name=AGENT_WORKFLOW)
class AgentWorkflow(JobWorkflow):
    """One job of one agent; the workflow id is the job id."""

    @workflow.init
    def __init__(self, job: AgentRunInput) -> None:
        info = workflow.info()
        branch, carried = info.run_id.rpartition("-")[2], job.carried
        self._job = job
        self._agent = job.agent.pinned(carried.pinned) if carried else job.agent
        self._is_new = carried is None
        self._state = (
            carried.model_copy(update={"branch": branch})
            if carried
            else JobState(
                branch=branch,
                deadline=info.workflow_start_time + job.agent.limits.max_wall_time,
            )
        )
        self._stepper = Stepper(job, self._state, time_left=self._time_left)
        self._hold = Hold(
            self._state,
            self._stepper,
            time_left=self._time_left,
            is_rolling_over=self._is_rolling_over,
            say=self._say,
        )
        self._caller = Caller(
            job,
            self._state,
            self._hold,
            tell=self._tell,
            time_left=self._time_left,
            is_rolling_over=self._is_rolling_over,
        )

    @workflow.run
    async def run(self, job: AgentRunInput) -> AgentJobResult:
        """Run the job to its answer or to a limit.

        Fails with an `ApplicationError` whose type names the kind and whose first detail, if any,
        is a hint.
        """
        if self._is_new:
            self._enter(JobStatus.RUNNING, "opening the job")
        try:
            result = await self._converse()
        except (ActivityError, ApplicationError, MusterError, asyncio.CancelledError) as error:
            self._is_ending = True
            is_asked = workflow.cancellation_reason() is not None
            if is_asked or not isinstance(error, asyncio.CancelledError):
                await self._hint_end()
            self._end_badly(error)
        self._is_ending = True
        if result.stop_reason is StopReason.ANSWERED:
            self._enter(JobStatus.COMPLETED, "answered")
        else:
            await self._hint_end()
            self._enter(JobStatus.STOPPED, f"stopped: {result.stop_reason} reached")
        return result

    @workflow.update(name=MESSAGE_UPDATE)
    def message(self, message: JobMessage) -> None:
        """Take a message for the next turn; one that is sent again is taken once."""
        self._state.receive(message)

    @message.validator
    def _check_message(self, message: JobMessage) -> None:
        with failure.as_refusal():
            self._refuse_if_ending("it reads no message any more")
            limit.check_message(message, self._state)

    async def _converse(self) -> AgentJobResult:
        """Take turns until an answer or a limit."""
        try:
            if self._is_new:
                limit.check_input(workflow.info().workflow_id, self._job)
                await self._open()
            while True:
                if self._is_rolling_over():
                    await self._roll_over()
                answer = await self._turn()
                if answer is not None:
                    return self._state.result(StopReason.ANSWERED, answer)
        except LimitReachedError as reached:
            return self._state.result(reached.stop_reason, await self._last_answer(reached))

    async def _open(self) -> None:
        """Store the opening conversation; the input itself waits for the first LLM step."""
        remaining, job_id = self._time_left(), workflow.info().workflow_id
        try:
            opened = await workflow.execute_activity(
                OPEN_JOB,
                OpenJobInput(job_id=job_id, agent=self._agent, tenant=self._job.tenant),
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
        self._state.pinned = list(opened.tools)
        self._agent = self._job.agent.pinned(opened.tools)
        self._state.pending = [Message(role=Role.USER, content=self._job.input)]

    async def _turn(self) -> str | None:
        """Take one turn, or the rest of one that a roll-over has cut. Return the job's answer."""
        state = self._state
        if not state.calls:
            if not await self._hold.unpaused():
                return None
            if stop := limit.reached(self._agent.limits, state):
                raise LimitReachedError(stop)
            self._time_left()
            state.read_inbox(MAX_APPEND_BYTES)
            form = offer(self._agent, state)
            message = await self._llm_step(form, self._agent.sampling)
            if not message.tool_calls:
                return self._take_answer(message, form)
            self._plan_calls(message.tool_calls, form)
        await self._answer_calls()
        return None

    def _take_answer(self, message: Message, form: OutputForm) -> str | None:
        """Return the answer if it ends the job: it was allowed, and nothing waits to be read."""
        if not form.may_answer:
            self._state.is_out = True
            self._state.pending = [turn.answer_refused(form)]
            return None
        return None if self._state.inbox else message.content

    async def _llm_step(self, form: OutputForm, sampling: Sampling) -> Message:
        """Make one LLM step and return the assistant message it committed."""
        self._say(f"waiting for LLM step {self._state.next_step}")
        return await self._stepper.make(form, sampling)

    def _plan_calls(self, calls: Sequence[ToolCall], form: OutputForm) -> None:
        """Open the calls of a message; raises `LimitReachedError` if a limit forbids them."""
        state = self._state
        state.calls = turn.plan_calls(calls, form, self._agent, state)
        makes = [each for each in state.calls if each.answer is None]
        if state.tool_calls + len(makes) > self._agent.limits.max_tool_calls:
            raise LimitReachedError(StopReason.MAX_TOOL_CALLS)
        for each in makes:
            state.count_call(each.call.tool)

    async def _answer_calls(self) -> None:
        """Make the open calls; if all have an answer then, let the next step read them."""
        state = self._state
        makes = [each for each in state.calls if each.answer is None]
        if makes:
            names = text.one_line(", ".join(each.call.tool for each in makes))
            self._say(f"calling {len(makes)} tool{'s' if len(makes) > 1 else ''}: {names}")
        await self._caller.make(makes, self._agent)
        if all(each.answer is not None for each in state.calls):
            state.pending = turn.tool_messages(state.calls)
            state.calls = []

    async def _last_answer(self, reached: LimitReachedError) -> str | None:
        """Ask the model for an answer with what it has; None if it cannot give one."""
        state, limits = self._state, self._agent.limits
        self._is_ending = True
        if (
            limits.last_answer_tokens == 0
            or state.context is None
            or held_back_by(self._agent.answer_after, state)
            or not workflow.patched(_LAST_ANSWER)
        ):
            return None
        stop = reached.stop_reason
        if state.calls:
            state.pending = turn.tool_messages(state.calls, missing=turn.limit_error(stop))
            state.calls = []
        state.read_inbox(MAX_APPEND_BYTES)
        state.pending.append(turn.last_words(stop))
        sampling = self._agent.sampling.model_copy(update={"max_tokens": limits.last_answer_tokens})
        try:
            await self._hold.unpaused()
            return (await self._llm_step(OutputForm(), sampling)).content
        except (LimitReachedError, ApplicationError) as error:
            workflow.logger.info("no last answer: %s", error)
            return None

    def _is_rolling_over(self) -> bool:
        """Say whether nothing new may be scheduled in this run."""
        return history_is_long() and not self._is_ending and workflow.patched(_ROLL_OVER)

    async def _roll_over(self) -> NoReturn:
        """Continue as new; nothing runs now. What is stored already is not recorded again."""
        await self._hold.settle()
        if workflow.cancellation_reason() is not None:
            raise asyncio.CancelledError
        turn.shrink(self._job.agent, self._state)
        update = {"input": text.one_line(self._job.input) or "…", "carried": self._state}
        workflow.continue_as_new(self._job.model_copy(update=update))

    async def _hint_end(self) -> None:
        """Tell the inference service that the job ends, unless it knows."""
        if self._state.is_out and workflow.patched(_HINTS):
            await self._stepper.hint(SessionState.ENDED)

    def _time_left(self) -> timedelta:
        """Return the wall time that is left, above zero; raises `OutOfTimeError` if none is."""
        left = self._state.deadline - workflow.now()
        if not self._is_ending:
            usual = left - limit.reserved_time(self._agent.limits)
            if usual > timedelta(0) or workflow.patched(_LAST_ANSWER):
                left = usual
        if left <= timedelta(0):
            raise OutOfTimeError
        return left

    def _details(self, waits: JobWaits) -> str:
        return text.details(self._agent, self._state, waits)
