"""Workflows that decide otherwise than ours: replay must notice."""

from __future__ import annotations

from temporalio import workflow

from contracts.job import AgentJobResult
from contracts.name import AGENT_WORKFLOW, PLAN_WORKFLOW
from workflows.agent import AgentWorkflow
from workflows.plan import PlanWorkflow
from workflows.plan_state import PlanRunInput
from workflows.state import AgentRunInput


@workflow.defn(name=AGENT_WORKFLOW)
class ChangedAgentWorkflow(AgentWorkflow):
    """Waits a second before it opens the job."""

    @workflow.init
    def __init__(self, job: AgentRunInput) -> None:
        super().__init__(job)

    @workflow.run
    async def run(self, job: AgentRunInput) -> AgentJobResult:
        """Run the job, a second late."""
        await workflow.sleep(1)
        return await super().run(job)


@workflow.defn(name=PLAN_WORKFLOW)
class ChangedPlanWorkflow(PlanWorkflow):
    """Waits a second before it begins."""

    @workflow.init
    def __init__(self, job: PlanRunInput) -> None:
        super().__init__(job)

    @workflow.run
    async def run(self, job: PlanRunInput) -> AgentJobResult:
        """Run the job, a second late."""
        await workflow.sleep(1)
        return await super().run(job)


CHANGED: list[type] = [ChangedAgentWorkflow, ChangedPlanWorkflow]
