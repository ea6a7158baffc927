"""A job that continues as new after each LLM step: the least that has the shape of one."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

from temporalio import workflow
from temporalio.client import Client, WorkflowHandle

with workflow.unsafe.imports_passed_through():
    from contracts.agent import AgentSpec
    from contracts.job import (
        AgentJobInput,
        AgentJobResult,
        OpenJobInput,
        OpenJobResult,
        StopReason,
    )
    from contracts.llm_step import LLMStepInput, LLMStepResult, Usage
    from contracts.message import ContextRef, Frozen, Message, Role
    from contracts.name import AGENT_WORKFLOW, LLM_STEP, OPEN_JOB, TOOLS_QUEUE, continue_queue

MODEL = "scripted"
LIMIT = timedelta(seconds=30)


class Carried(Frozen):
    """What one run leaves to the next."""

    number: int
    context: ContextRef


@workflow.defn(name=AGENT_WORKFLOW)
class RollingWorkflow:
    """One LLM step a run, `input` of them; the last run ends with the last step's words."""

    @workflow.run
    async def run(self, job: AgentJobInput, carried: Carried | None = None) -> AgentJobResult:
        """Take this run's step."""
        job_id, runs = workflow.info().workflow_id, int(job.input)
        if carried is None:
            opened: OpenJobResult = await workflow.execute_activity(
                OPEN_JOB,
                OpenJobInput(job_id=job_id, agent=job.agent),
                result_type=OpenJobResult,
                task_queue=TOOLS_QUEUE,
                start_to_close_timeout=LIMIT,
            )
            carried = Carried(number=1, context=opened.context)
        step = LLMStepInput(
            step_id=f"{job_id}/b/{carried.number}",
            job_id=job_id,
            model=job.model,
            base=carried.context,
            append=(Message(role=Role.USER, content=f"question {carried.number}"),),
        )
        result: LLMStepResult = await workflow.execute_activity(
            LLM_STEP,
            step,
            result_type=LLMStepResult,
            task_queue=continue_queue(job.model),
            start_to_close_timeout=LIMIT,
        )
        assert result.context is not None and result.message is not None
        if carried.number < runs:
            following = Carried(number=carried.number + 1, context=result.context)
            workflow.continue_as_new(args=[job, following])
        return AgentJobResult(
            answer=result.message.content,
            stop_reason=StopReason.ANSWERED,
            turns=runs,
            llm_steps=runs,
            tool_calls=0,
            usage=Usage(),
        )


async def start_rolling(
    client: Client, task_queue: str, runs: int
) -> WorkflowHandle[RollingWorkflow, AgentJobResult]:
    """Start a job of that many runs."""
    job = AgentJobInput(
        agent=AgentSpec(name="roller", instructions="Roll."), input=str(runs), model=MODEL
    )
    return await client.start_workflow(
        RollingWorkflow.run, args=[job, None], id=f"job-{uuid4()}", task_queue=task_queue
    )
