"""The `open_job` activity: pin what the whole job uses, before its first LLM step."""

from __future__ import annotations

from pydantic import JsonValue
from pydantic_core import to_json
from temporalio import activity

from activities.error_map import application_error
from activities.loader import ToolLoader
from contracts.agent import AgentSpec, SubAgent, ToolSchema
from contracts.error import LimitExceededError, MusterError
from contracts.job import OpenJobInput, OpenJobResult
from contracts.limit import MAX_TOOLSET_BYTES
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
            schemas = await self._schemas(job.agent)
            opening = [Message(role=Role.SYSTEM, content=job.agent.instructions)]
            messages = [*opening, *job.agent.examples]
            head, toolset = await self._contexts.open(job.job_id, messages, schemas)
        except MusterError as error:
            raise application_error(error) from None
        return OpenJobResult(context=ContextRef(head=head), toolset=toolset)

    async def _schemas(self, agent: AgentSpec) -> JsonValue:
        """Return what the model is told of the agent's tools, None if it has none."""
        if not agent.callables:
            return None
        schemas: list[JsonValue] = []
        for ref in agent.tools:
            tool = await self._loader.load(ref)
            schemas.append(tool.schema.model_dump(mode="json"))
        schemas += [_schema_of(each).model_dump(mode="json") for each in agent.agents]
        size = len(to_json(schemas))
        if size > MAX_TOOLSET_BYTES:
            raise LimitExceededError(
                f"the schemas of the {len(schemas)} tools of agent {agent.name!r}, as JSON,",
                size,
                MAX_TOOLSET_BYTES,
                "bytes",
                hint="give the agent fewer tools, or their parameters simpler types",
            )
        return schemas


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
