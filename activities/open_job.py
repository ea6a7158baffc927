"""The `open_job` activity: pin what the whole job uses, before its first LLM step."""

from __future__ import annotations

from pydantic import JsonValue
from temporalio import activity

from activities.error_map import application_error
from activities.loader import ToolLoader
from contracts.agent import AgentSpec, SubAgent, ToolSchema
from contracts.error import MusterError
from contracts.job import OpenJobInput, OpenJobResult
from contracts.message import ContextRef, Message, Role
from contracts.name import OPEN_JOB, TASK
from store.context import ContextStore
from store.database import Database


class OpenJob:
    """Stores a job's opening conversation and toolset; idempotent: both are named by content."""

    def __init__(self, database: Database) -> None:
        self._contexts = ContextStore(database)
        self._loader = ToolLoader()

    @activity.defn(name=OPEN_JOB)
    async def open_job(self, job: OpenJobInput) -> OpenJobResult:
        """Load every tool, store instructions, examples and tool schemas; return their names."""
        try:
            toolset = await self._pin_tools(job.agent)
            opening = [Message(role=Role.SYSTEM, content=job.agent.instructions)]
            head = await self._contexts.put(None, [*opening, *job.agent.examples])
        except MusterError as error:
            raise application_error(error) from None
        return OpenJobResult(context=ContextRef(head=head), toolset=toolset)

    async def _pin_tools(self, agent: AgentSpec) -> str | None:
        if not agent.callables:
            return None
        schemas: list[JsonValue] = []
        for ref in agent.tools:
            tool = await self._loader.load(ref)
            schemas.append(tool.schema.model_dump(mode="json"))
        schemas += [_schema_of(each).model_dump(mode="json") for each in agent.agents]
        return await self._contexts.put_blob(schemas)


def _schema_of(sub_agent: SubAgent) -> ToolSchema:
    """Return what the model is told of a sub-agent: it takes one task, as text."""
    return ToolSchema(
        name=sub_agent.name,
        description=sub_agent.description,
        arguments={
            "type": "object",
            "properties": {TASK: {"type": "string", "minLength": 1}},
            "required": [TASK],
            "additionalProperties": False,
        },
    )
