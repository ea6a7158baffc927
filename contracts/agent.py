"""An agent as people declare it in YAML: instructions, tools with their policies, limits."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Annotated

from pydantic import Field, JsonValue, StringConstraints, field_validator, model_validator

from contracts.limit import (
    HARD_TOOL_RESULT_BYTES,
    MAX_AGENT_DEPTH,
    MAX_PARALLEL_TOOL_CALLS,
    MAX_SEED,
    MAX_TOOL_RESULT_BYTES,
    MAX_TOOLS,
)
from contracts.message import Frozen, Message

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]
ImportPath = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", max_length=200)
]

Duration = Annotated[timedelta, Field(gt=timedelta(0), le=timedelta(days=366))]
"""A time Temporal can keep: it refuses zero, negative and very long ones over and over."""


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
    enforced by the grammar of the model's output, so a small model cannot choose wrong.
    """

    after: tuple[Name, ...] = ()
    max_calls: int | None = Field(None, ge=1)
    on_failure: OnFailure = OnFailure.TELL_MODEL


class ToolPolicy(UsePolicy):
    """How one tool may be used by one agent."""

    timeout: Duration = timedelta(seconds=60)
    """Start to close of one attempt."""
    queue_timeout: Duration = timedelta(minutes=10)
    """Schedule to start: how long a call may wait for a tool worker."""
    retry: RetryPolicy = RetryPolicy()
    max_result_bytes: int = Field(MAX_TOOL_RESULT_BYTES, ge=1, le=HARD_TOOL_RESULT_BYTES)


class ToolRef(ToolPolicy):
    """A tool as an agent file names it: a plain Python function and the policy of its use."""

    function: ImportPath
    name: Name | None = None
    """The name the model sees; the function's own name if not given."""

    @property
    def tool_name(self) -> str:
        """The name the model sees."""
        return self.name or self.function.rpartition(":")[2]


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
        """All that the model can call: tools, then sub-agents."""
        return (*self.tools, *self.agents)

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
        for each in self.callables:
            for name in each.after:
                if name not in names or name == each.tool_name:
                    raise ValueError(
                        f"tool {each.tool_name!r}: `after` names {name!r}, "
                        f"which is not another tool of this agent"
                    )
        for name in self.answer_after:
            if name not in names:
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
