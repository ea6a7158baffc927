"""One job: one execution of an agent, from its input to its answer."""

from __future__ import annotations

from enum import StrEnum

from pydantic import AwareDatetime, Field

from contracts.agent import AgentSpec, PinnedTool
from contracts.limit import MAX_MESSAGE_ID_CHARS
from contracts.llm_step import Usage
from contracts.message import ContextRef, Frozen, is_empty


class AgentJobInput(Frozen):
    """Start input of `AgentWorkflow`. The workflow id is the job id.

    After `deadline` nobody wants the answer any more: LLM steps go earlier the nearer it is, and
    one that still waits then fails the job.
    """

    agent: AgentSpec
    input: str = Field(min_length=1)
    model: str
    """Served model name, resolved by the client from the agent or the stack's default."""
    tenant: str = "default"
    priority: int = Field(3, ge=1, le=5)
    deadline: AwareDatetime | None = None

    @property
    def name(self) -> str:
        """The agent's name."""
        return self.agent.name


class JobStatus(StrEnum):
    """How a job stands, as people see it."""

    RUNNING = "running"
    COMPLETED = "completed"
    STOPPED = "stopped"
    """A limit of the agent was reached; `stop_reason` names it."""
    FAILED = "failed"
    CANCELLED = "cancelled"
    TERMINATED = "terminated"


class StopReason(StrEnum):
    """Why a job that returned has ended."""

    ANSWERED = "answered"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    MAX_TOOL_CALLS = "max_tool_calls"
    MAX_WALL_TIME = "max_wall_time"
    MAX_LLM_STEPS = "max_llm_steps"
    MAX_ENGINE_TIME = "max_engine_time"


def _is_zero(value: float) -> bool:
    return value == 0


class AgentJobResult(Frozen):
    """Result of `AgentWorkflow`.

    When a limit stopped the job, `answer` is the last answer it gave then; None if it gave none.
    """

    answer: str | None
    stop_reason: StopReason
    turns: int
    llm_steps: int
    tool_calls: int
    usage: Usage
    engine_s: float = 0.0
    """Time of its LLM steps in the engine, in seconds."""
    waited_s: float = Field(0.0, exclude_if=_is_zero)
    """Time during which it waited for people alone: for approval, or paused; in seconds."""
    unread: tuple[str, ...] = Field((), exclude_if=is_empty)
    """Ids of the messages that it had taken and no LLM step has read, since a limit ended it."""


class Spent(Frozen):
    """What a job had used when it failed, sub-agents included: a detail of its failure."""

    llm_steps: int
    tool_calls: int
    usage: Usage
    engine_s: float


class JobMessage(Frozen):
    """What a person or program says to a running job; the `message` update's input.

    The sender chooses `id`: a message that is sent again under its id is delivered once.
    """

    id: str = Field(min_length=1, max_length=MAX_MESSAGE_ID_CHARS)
    text: str = Field(min_length=1)


class JobProgress(Frozen):
    """Answer of the `progress` query: what the job is doing now, in one line.

    `waits` is what it waits for from people, be it beside other things, and how they give it.
    """

    turns: int
    llm_steps: int
    tool_calls: int
    doing: str
    usage: Usage
    waits: str = ""


class OpenJobInput(Frozen):
    """Input of the `open_job` activity, which pins what the whole job uses."""

    job_id: str
    agent: AgentSpec
    tenant: str = "default"


class OpenJobResult(Frozen):
    """What `open_job` stored: the opening conversation, and the toolset's hash if there is one.

    `tools` are those that the agent's servers have.
    """

    context: ContextRef
    toolset: str | None
    tools: tuple[PinnedTool, ...] = Field((), exclude_if=is_empty)
