"""A workflow that decides otherwise than ours: replay must notice."""

from __future__ import annotations

from temporalio import workflow

from contracts.job import AgentJobResult
from contracts.name import AGENT_WORKFLOW
from workflows.agent import AgentWorkflow
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
