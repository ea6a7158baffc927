"""The LLM steps of a job, one after the other, and what the inference service is told beside them.

What a step has used counts however it ends. A step that failed for good fails the job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from contracts.agent import Sampling
    from contracts.job import AgentJobInput
    from contracts.llm_step import (
        Hints,
        LLMStepInput,
        LLMStepResult,
        Outcome,
        OutputForm,
        SessionHint,
        SessionState,
    )
    from contracts.message import Message
    from contracts.name import LLM_STEP, SESSION_HINT
    from workflows import failure, option, text
    from workflows.failure import OutOfTimeError
    from workflows.state import JobState

_TOLD = {SessionState.ENDED: "has ended", SessionState.WAITING: "waits for a person"}


class Stepper:
    """Makes the LLM steps of a job.

    `time_left` returns the wall time that is left, or raises `OutOfTimeError`.
    """

    def __init__(
        self, job: AgentJobInput, state: JobState, *, time_left: Callable[[], timedelta]
    ) -> None:
        self._job = job
        self._state = state
        self._time_left = time_left

    async def make(self, form: OutputForm, sampling: Sampling) -> Message:
        """Make one LLM step and return the assistant message it committed."""
        self._state.is_idle = False
        state, number, job_id = self._state, self._state.next_step, workflow.info().workflow_id
        step = LLMStepInput(
            step_id=state.take_step_id(job_id),
            job_id=job_id,
            model=self._job.model,
            base=state.context,
            append=tuple(state.pending),
            toolset=state.toolset,
            output=form,
            sampling=sampling,
            hints=Hints(
                priority=self._job.priority,
                attained_s=state.attained_s,
                tenant=self._job.tenant,
                deadline=self._job.deadline,
            ),
        )
        options = option.llm_step_options(
            self._job, self._time_left(), is_first=state.llm_steps == 0
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
            self._time_left()
            if failure.ran_out_of_time(error):
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

    async def hint(self, session: SessionState) -> None:
        """Tell the inference service what became of the job's session; it may not be there."""
        try:
            await workflow.execute_activity(
                SESSION_HINT,
                SessionHint(job_id=workflow.info().workflow_id, state=session),
                summary=text.summary(f"tell the inference service that the job {_TOLD[session]}"),
                **option.session_hint_options(self._job),
            )
        except (ActivityError, asyncio.CancelledError):
            workflow.logger.info("the inference service was not told that the job %s", session)
