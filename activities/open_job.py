"""The `open_job` activity: pin what the whole job uses, before its first LLM step."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pydantic import JsonValue
from pydantic_core import to_json
from temporalio import activity

from activities.approval import check_rules
from activities.error_map import application_error, describe, trace
from activities.tool import ServedTool
from activities.toolbox import Toolbox
from contracts.agent import (
    NAME_PATTERN,
    AgentSpec,
    PinnedTool,
    SubAgent,
    ToolRef,
    ToolSchema,
)
from contracts.error import BadInputError, LimitExceededError, MusterError, UnavailableError
from contracts.job import OpenJobInput, OpenJobResult
from contracts.limit import MAX_TOOLS, MAX_TOOLSET_BYTES
from contracts.message import ContextRef, Message, Role
from contracts.name import OPEN_JOB, TASK
from store.context import ContextStore
from store.database import Database

MAX_ATTEMPTS = 5
"""Attempts at a job's opening before a server that does not tell its tools fails it."""

_log = logging.getLogger(__name__)


class OpenJob:
    """Stores a job's opening conversation and toolset; idempotent: both are named by content."""

    def __init__(self, database: Database, toolbox: Toolbox) -> None:
        self._contexts = ContextStore(database)
        self._toolbox = toolbox
        self._scrub = toolbox.secrets.scrub

    @activity.defn(name=OPEN_JOB)
    async def open_job(self, job: OpenJobInput) -> OpenJobResult:
        """Load every tool, store instructions, examples and tool schemas; return their names."""
        try:
            check_rules(job.agent)
            tools = await self._find_tools(job.agent, job.tenant)
            agent = job.agent.pinned(tools.pinned)
            _check_names(agent)
            schemas = [*tools.schemas, *(_schema_of(each) for each in agent.agents)]
            opening = [Message(role=Role.SYSTEM, content=agent.instructions)]
            head, toolset = await self._contexts.open(
                job.job_id, [*opening, *agent.examples], _toolset(agent, schemas)
            )
        except MusterError as error:
            raise application_error(error, self._scrub) from None
        return OpenJobResult(
            context=ContextRef(head=head), toolset=toolset, tools=tuple(tools.pinned)
        )

    async def _find_tools(self, agent: AgentSpec, tenant: str) -> _Tools:
        """Return what the model is told of the agent's tools; its servers are asked now."""
        found = _Tools()
        for place, ref in enumerate(agent.tools):
            served = await self._describe(ref, tenant)
            if not ref.is_server:
                found.schemas.append(served[0].schema)
                continue
            for each in _chosen(ref, served):
                assert each.remote is not None
                prefix = f"{ref.name}_" if ref.name else ""
                name = _checked_name(ref, f"{prefix}{each.schema.name}")
                found.schemas.append(each.schema.model_copy(update={"name": name}))
                found.pinned.append(PinnedTool(name=name, server=place, remote=each.remote))
        return found

    async def _describe(self, ref: ToolRef, tenant: str) -> list[ServedTool]:
        """Return what a source says of its tools, without the secrets that it was asked with."""
        try:
            served = await self._toolbox.describe(ref, tenant)
        except UnavailableError as error:
            if activity.info().attempt < MAX_ATTEMPTS:
                raise
            raise BadInputError(
                f"{error.message} (gave up after {MAX_ATTEMPTS} attempts)", hint=error.hint
            ) from None
        except MusterError:
            raise
        except Exception as error:  # a bug in a kind, or in what it is built on
            _log.error("%s %r failed: %s", ref.kind, ref.shown, trace(error, self._scrub))
            raise BadInputError(f"{ref.kind} {ref.shown!r}: {describe(error)}") from None
        return [self._scrubbed(each) for each in served]

    def _scrubbed(self, tool: ServedTool) -> ServedTool:
        told = tool.schema.model_dump_json(exclude={"name"})
        if (clean := self._scrub(told)) == told:
            return tool
        schema = ToolSchema.model_validate({"name": tool.schema.name, **json.loads(clean)})
        return replace(tool, schema=schema)


@dataclass(slots=True)
class _Tools:
    """Schemas of an agent's tools, in order, and those of them that its servers have."""

    schemas: list[ToolSchema] = field(default_factory=list)
    pinned: list[PinnedTool] = field(default_factory=list)


def _chosen(ref: ToolRef, served: Sequence[ServedTool]) -> list[ServedTool]:
    """Return those of a server's tools that the agent asks for, all if it names none."""
    there = [each.remote for each in served]
    for name in ref.tools:
        if name not in there:
            known = ", ".join(map(str, there[:MAX_TOOLS])) or "none"
            raise BadInputError(
                f"{ref.kind} {ref.shown!r} has no tool {name!r}", hint=f"it has: {known}"
            )
    return [each for each in served if not ref.tools or each.remote in ref.tools]


def _checked_name(ref: ToolRef, name: str) -> str:
    if not re.match(NAME_PATTERN, name):
        raise BadInputError(
            f"{ref.kind} {ref.shown!r}: {name!r} is no name for a tool: it takes letters, digits, "
            f"`_` and `-`, begins with a letter, and has at most 64 characters",
            hint="leave it out with `tools`, or name it alone with `remote` and `name`",
        )
    return name


def _check_names(agent: AgentSpec) -> None:
    """Check what only a job that opens can know: how many tools there are, and their names."""
    if len(agent.callables) > MAX_TOOLS:
        raise LimitExceededError(
            f"agent {agent.name!r}",
            len(agent.callables),
            MAX_TOOLS,
            "tools",
            hint="choose some of a server's tools with `tools: [...]`",
        )
    names = [each.tool_name for each in agent.callables]
    for name, count in Counter(names).items():
        if count > 1:
            owners = " and ".join(
                each.tool_name if isinstance(each, SubAgent) else f"{each.kind} {each.origin!r}"
                for each in agent.callables
                if each.tool_name == name
            )
            raise BadInputError(
                f"agent {agent.name!r} has {count} tools named {name!r}: {owners}",
                hint="give one of them a `name`; a server's name comes before those of its tools",
            )
    used = {("after", name) for each in agent.callables for name in each.after}
    for key, name in (*sorted(used), *(("answer_after", name) for name in agent.answer_after)):
        if name not in names:
            raise BadInputError(
                f"agent {agent.name!r}: `{key}` names {name!r}, which is not one of its tools",
                hint=f"the tools are {', '.join(names)}",
            )


def _toolset(agent: AgentSpec, schemas: Sequence[ToolSchema]) -> JsonValue:
    """Return the schemas as JSON, None if there are none; raises LimitExceededError."""
    if not schemas:
        return None
    dumped: list[JsonValue] = [each.model_dump(mode="json") for each in schemas]
    size = len(to_json(dumped))
    if size > MAX_TOOLSET_BYTES:
        raise LimitExceededError(
            f"the schemas of the {len(dumped)} tools of agent {agent.name!r}, as JSON,",
            size,
            MAX_TOOLSET_BYTES,
            "bytes",
            hint="give the agent fewer tools, or their parameters simpler types",
        )
    return dumped


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
