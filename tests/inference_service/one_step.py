"""The smallest workflow that takes LLM steps, one after the other."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.workflow import ActivityCancellationType

with workflow.unsafe.imports_passed_through():
    from contracts.llm_step import LLMStepInput, LLMStepResult
    from contracts.message import Frozen
    from contracts.name import LLM_STEP


class OneStepInput(Frozen):
    """A step, its queue, and how long Temporal waits for heartbeats."""

    step: LLMStepInput
    queue: str
    heartbeat_timeout: timedelta = timedelta(seconds=30)


@workflow.defn
class OneStep:
    """Takes one LLM step the way jobs do."""

    @workflow.run
    async def run(self, given: OneStepInput) -> LLMStepResult:
        """Return the step's result, also that of a cancelled step."""
        result: LLMStepResult = await workflow.execute_activity(
            LLM_STEP,
            given.step,
            task_queue=given.queue,
            result_type=LLMStepResult,
            schedule_to_close_timeout=timedelta(minutes=5),
            heartbeat_timeout=given.heartbeat_timeout,
            retry_policy=RetryPolicy(
                initial_interval=timedelta(milliseconds=100),
                maximum_interval=timedelta(seconds=1),
            ),
            cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        )
        return result
