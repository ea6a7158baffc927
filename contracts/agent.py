"""An agent as people declare it in YAML: instructions, tools with their policies, limits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Annotated

from pydantic import (
    Field,
    JsonValue,
    StringConstraints,
    field_validator,
    model_validator,
)

from contracts.approval import Approval, ApprovalMode, ApprovalPolicy
from contracts.limit import (
    HARD_TOOL_RESULT_BYTES,
    MAX_AGENT_DEPTH,
    MAX_PARALLEL_TOOL_CALLS,
    MAX_SEED,
    MAX_TOOL_RESULT_BYTES,
    MAX_TOOLS,
)
from contracts.message import Frozen, Message, is_empty, is_none
from contracts.name import tool_queue
from contracts.tool_source import (
    Duration,
    McpServer,
    OpenApiService,
    RemoteActivity,
    SqlDatabase,
)

NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9_-]{0,63}$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
ImportPath = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", max_length=200)
]

KINDS = ("function", "mcp", "openapi", "sql", "activity")
"""The ways in which a tool is given."""

ToolName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
"""What a server calls one of its tools."""


def _is_never(approval: ApprovalMode | Approval) -> bool:
    return approval is ApprovalMode.NEVER


class OnFailure(StrEnum):
    """What a tool call's permanent failure does: the model is told, or the job fails."""

    TELL_MODEL = "tell_model"
    FAIL_JOB = "fail_job"


class RetryPolicy(Frozen):
    """Bounded retries of a tool call's transient failures, with exponential backoff."""

    max_attempts: int = Field(4, ge=1, le=20)
    initial_interval: Duration = timedelta(seconds=1)
    max_interval: Duration = timedelta(seconds=30)
    backoff: float = Field(2.0, ge=1.0, le=10.0)


class UsePolicy(Frozen):
    """When an agent may call a tool or a sub-agent, and what its failure does.

    `after` and `max_calls` narrow what the model may choose at each turn: it is offered only once
    everything in `after` has answered in this job, and at most `max_calls` times. The choice is
    enforced by the grammar of the model's output, so a small model cannot choose wrong. A call that
    needs `approval` is made once people have approved it; one that was denied counts as made.
    """

    after: tuple[Name, ...] = ()
    max_calls: int | None = Field(None, ge=1)
    on_failure: OnFailure = OnFailure.TELL_MODEL
    approval: ApprovalPolicy = Field(ApprovalMode.NEVER, exclude_if=_is_never)

    @property
    def approval_policy(self) -> Approval | None:
        """Which calls need approval, by whom; None if none does."""
        if isinstance(self.approval, Approval):
            return self.approval
        return Approval() if self.approval is ApprovalMode.ALWAYS else None


class ToolPolicy(UsePolicy):
    """How one tool may be used by one agent."""

    timeout: Duration = timedelta(seconds=60)
    """Start to close of one attempt."""
    queue_timeout: Duration = timedelta(minutes=10)
    """Schedule to start: how long a call may wait for a tool worker."""
    retry: RetryPolicy = RetryPolicy()
    max_result_bytes: int = Field(MAX_TOOL_RESULT_BYTES, ge=1, le=HARD_TOOL_RESULT_BYTES)
    group: Name | None = Field(None, exclude_if=is_none)
    """Group of tools whose rate and concurrency the tool workers are told: a task queue of its
    own."""


class ToolRef(ToolPolicy):
    """A tool as an agent file names it, of exactly one kind, and the policy of its use.

    `mcp` and `openapi` without `remote` stand for all tools of a server, or for those in `tools`;
    which they are is asked when the job opens, and pinned.
    """

    function: ImportPath | None = None
    """A plain Python function."""
    mcp: McpServer | None = Field(None, exclude_if=is_none)
    openapi: OpenApiService | None = Field(None, exclude_if=is_none)
    sql: SqlDatabase | None = Field(None, exclude_if=is_none)
    activity: RemoteActivity | None = Field(None, exclude_if=is_none)
    name: Name | None = None
    """The name the model sees, if not its own; before a server's tools, as `name_tool`."""
    tools: tuple[ToolName, ...] = Field((), max_length=MAX_TOOLS, exclude_if=is_empty)
    """Which of a server's tools are offered, by their names there."""
    remote: ToolName | None = Field(None, exclude_if=is_none)
    """One tool of a server, by its name there."""

    @property
    def kind(self) -> str:
        """Which of the ways it is given in: the name of the one field of `KINDS` that is set."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def is_server(self) -> bool:
        """Say whether this stands for tools that only the server knows."""
        return (self.mcp or self.openapi) is not None and self.remote is None

    @property
    def tool_name(self) -> str:
        """The name the model sees; of a server, what its tools' names begin with, if anything."""
        if self.name:
            return self.name
        if self.function:
            return self.function.rpartition(":")[2]
        if self.activity:
            return self.activity.type
        return self.remote or ("sql" if self.sql else "")

    @property
    def queue(self) -> str:
        """Task queue on which its calls wait."""
        return self.activity.queue if self.activity else tool_queue(self.group)

    @property
    def shown(self) -> str:
        """What names this tool to the people who wrote the agent."""
        return self.function or self.tool_name or self.origin

    @property
    def origin(self) -> str:
        """Where the tool comes from: a function, a server, a document, a database's tool."""
        if self.mcp:
            return self.mcp.url or " ".join(self.mcp.command)
        if self.openapi:
            return self.openapi.document
        return self.function or self.tool_name

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> ToolRef:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            found = f"it has {' and '.join(given)}" if given else "it has none of them"
            raise ValueError(f"a tool has exactly one of {', '.join(KINDS)}; {found}")
        if (self.tools or self.remote) and not (self.mcp or self.openapi):
            raise ValueError(f"`tools` and `remote` name tools of a server; this is a {given[0]}")
        if self.tools and self.remote:
            raise ValueError("`tools` chooses several of a server's tools, `remote` names one")
        if self.group and self.activity:
            raise ValueError(
                "`group` is for tools that Muster's tool workers run; an activity has its `queue`, "
                "whose rate its own workers set"
            )
        if not self.is_server and not re.match(NAME_PATTERN, self.tool_name):
            raise ValueError(f"{self.tool_name!r} is no name for a tool; give it a `name`")
        return self


class PinnedTool(Frozen):
    """A server's tool as a job knows it; `server` is its entry's place in the agent's tools."""

    name: Name
    server: int = Field(ge=0)
    remote: ToolName


class ToolSchema(Frozen):
    """What the model is told of a tool: name, description, JSON schema of its arguments object."""

    name: Name
    description: str
    arguments: dict[str, JsonValue]


class Sampling(Frozen):
    """How tokens are sampled; `max_tokens` bounds one LLM step's output."""

    temperature: float = Field(0.0, ge=0.0, le=2.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    seed: int | None = Field(0, ge=0, le=MAX_SEED)
    max_tokens: int = Field(256, ge=1, le=32_768)


class Limits(Frozen):
    """What one job may use. At a limit it makes one more LLM step, for a last answer, and stops.

    That step comes on top of the limits; wall time alone is kept back for it.
    """

    max_turns: int = Field(16, ge=1, le=10_000)
    max_tokens: int = Field(100_000, ge=1)
    """Prompt tokens not served from cache, plus generated tokens, over the whole job."""
    max_tool_calls: int = Field(64, ge=0, le=10_000)
    max_wall_time: Duration = timedelta(hours=24)
    max_llm_steps: int | None = Field(None, ge=1)
    """LLM steps that returned, those of sub-agents included."""
    max_engine_time: Duration | None = None
    """Time of its steps in the engine (prefill and decode): on a GPU, GPU seconds, shared with the
    steps that were batched with them."""
    last_answer_tokens: int = Field(256, ge=0, le=32_768)
    """Output of the last answer; 0 stops the job at a limit without one."""


class SubAgent(UsePolicy):
    """An agent that another one calls like a tool: it is given a task, and its answer is read.

    It runs as a job of its own, within what is left of its caller's limits.
    """

    name: Name
    description: str = Field(min_length=1, max_length=4_000)
    agent: AgentSpec

    @property
    def tool_name(self) -> str:
        """The name the model sees."""
        return self.name


class AgentSpec(Frozen):
    """A declared agent.

    `answer_after` holds the final answer back until those tools have answered. `examples` are
    few-shot messages that stand between the instructions and the user's input.
    """

    name: Name
    instructions: str = Field(min_length=1)
    model: Name | None = None
    """Served model name; the stack's default model if not given."""
    tools: tuple[ToolRef, ...] = Field((), max_length=MAX_TOOLS)
    agents: tuple[SubAgent, ...] = Field((), max_length=MAX_TOOLS)
    answer_after: tuple[Name, ...] = ()
    max_parallel_tool_calls: int = Field(1, ge=1, le=MAX_PARALLEL_TOOL_CALLS)
    examples: tuple[Message, ...] = ()
    sampling: Sampling = Sampling()
    limits: Limits = Limits()

    @property
    def callables(self) -> tuple[ToolRef | SubAgent, ...]:
        """All that the model can call: tools, then sub-agents; servers' tools once pinned."""
        return (*(tool for tool in self.tools if not tool.is_server), *self.agents)

    @property
    def has_servers(self) -> bool:
        """Say whether some of its tools are known only when a job opens."""
        return any(tool.is_server for tool in self.tools)

    def pinned(self, tools: Sequence[PinnedTool]) -> AgentSpec:
        """Return the agent with the tools that its servers had when the job opened."""
        refs: list[ToolRef] = []
        for place, ref in enumerate(self.tools):
            if not ref.is_server:
                refs.append(ref)
            refs += [
                ref.model_copy(update={"name": each.name, "remote": each.remote, "tools": ()})
                for each in tools
                if each.server == place
            ]
        return self.model_copy(update={"tools": tuple(refs)})

    @property
    def depth(self) -> int:
        """Levels of agents: 1 for one without sub-agents."""
        return 1 + max((each.agent.depth for each in self.agents), default=0)

    @field_validator("examples")
    @classmethod
    def _examples_are_written_out(cls, examples: tuple[Message, ...]) -> tuple[Message, ...]:
        if any(message.blob for message in examples):
            raise ValueError("an example has its text in `content`; `blob` is for tool results")
        return examples

    @model_validator(mode="after")
    def _named_tools_exist(self) -> AgentSpec:
        names = [each.tool_name for each in self.callables]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two tools are named {name!r}; give one of them another `name`")
        callables: tuple[ToolRef | SubAgent, ...] = (*self.tools, *self.agents)
        for each in callables:
            for name in each.after:
                is_unknown = name not in names and not self.has_servers
                if is_unknown or name == each.tool_name:
                    raise ValueError(
                        f"tool {each.tool_name!r}: `after` names {name!r}, "
                        f"which is not another tool of this agent"
                    )
        for name in self.answer_after:
            if name not in names and not self.has_servers:
                raise ValueError(
                    f"`answer_after` names {name!r}, which is not a tool of this agent"
                )
        return self

    @model_validator(mode="after")
    def _is_not_too_deep(self) -> AgentSpec:
        if self.depth > MAX_AGENT_DEPTH:
            raise ValueError(
                f"agents call agents {self.depth} levels deep, the limit is {MAX_AGENT_DEPTH}"
            )
        return self


SubAgent.model_rebuild()
