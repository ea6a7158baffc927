"""A workflow that takes LLM steps one after the other: a job without tools and without thought."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from contracts.agent import Sampling
    from contracts.llm_step import LLMStepInput, LLMStepResult
    from contracts.message import ContextRef, Frozen, Message, Role
    from contracts.name import LLM_STEP, continue_queue, start_queue


class StepChainInput(Frozen):
    """How many steps, of which model."""

    model: str
    steps: int


@workflow.defn
class StepChain:
    """Takes `steps` LLM steps of one session."""

    @workflow.run
    async def run(self, given: StepChainInput) -> None:
        """Return when the last step has."""
        base: ContextRef | None = None
        job_id = workflow.info().workflow_id
        for number in range(given.steps):
            result = await workflow.execute_activity(
                LLM_STEP,
                LLMStepInput(
                    step_id=f"{job_id}/bench/{number}",
                    job_id=job_id,
                    model=given.model,
                    base=base,
                    append=(Message(role=Role.USER, content=f"Message number {number}."),),
                    sampling=Sampling(max_tokens=16),
                ),
                task_queue=(start_queue if base is None else continue_queue)(given.model),
                result_type=LLMStepResult,
                schedule_to_close_timeout=timedelta(minutes=10),
                heartbeat_timeout=timedelta(seconds=30),
            )
            base = result.context
