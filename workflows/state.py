"""The state of an agent job: one serialisable object, so that a job can roll over to a new run."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from contracts.job import AgentJobResult, JobProgress, StopReason
from contracts.llm_step import LLMStepResult, Usage
from contracts.message import ContextRef, Message
from contracts.tool import ToolOutcome


class ToolTally(BaseModel):
    """What became of one tool's calls in this job; `calls` counts those that were really made."""

    model_config = ConfigDict(extra="forbid")

    calls: int = 0
    answers: int = 0
    last_error: str = ""


class JobState(BaseModel):
    """Everything an agent job knows between two LLM steps.

    The conversation is the stored `context` followed by `pending`, which no LLM step has committed
    yet. `branch` and `next_step` make step ids; both outlive a roll-over. The branch is the end of
    a run id: its beginning is a clock, which two runs of one job can share. `attained_s` is the
    engine time used so far, in seconds. `is_out` says that the last step asked for tools, so the
    inference service waits for the next.
    """

    model_config = ConfigDict(extra="forbid")

    branch: str
    deadline: datetime
    context: ContextRef | None = None
    toolset: str | None = None
    pending: list[Message] = Field(default_factory=list)
    next_step: int = 1
    turns: int = 0
    llm_steps: int = 0
    tool_calls: int = 0
    usage: Usage = Usage()
    attained_s: float = 0.0
    is_out: bool = False
    tools: dict[str, ToolTally] = Field(default_factory=dict)
    doing: str = "starting"

    def tally(self, tool: str) -> ToolTally:
        """Return the counts of one tool, zero if it was never called."""
        return self.tools.get(tool, ToolTally())

    def take_step_id(self, job_id: str) -> str:
        """Return the id of the next LLM step; no id is given out twice."""
        number = self.next_step
        self.next_step += 1
        return f"{job_id}/{self.branch}/{number}"

    def count_step(self, result: LLMStepResult) -> None:
        """Account for a step that returned, finished or cancelled."""
        self.llm_steps += 1
        self.usage = self.usage + result.usage
        self.attained_s += result.timing.prefill_s + result.timing.decode_s

    def advance(self, context: ContextRef) -> None:
        """Take over the conversation that a finished step committed; its messages are stored."""
        self.turns += 1
        self.context = context
        self.pending = []

    def count_call(self, tool: str) -> None:
        """Account for a tool call that is about to be made."""
        self.tool_calls += 1
        self.tools.setdefault(tool, ToolTally()).calls += 1

    def count_answer(self, tool: str, outcome: ToolOutcome, content: str) -> None:
        """Account for what a made call came to; `content` is kept only if it is an error."""
        tally = self.tools[tool]
        if outcome is ToolOutcome.OK:
            tally.answers += 1
        else:
            tally.last_error = content

    def result(self, stop_reason: StopReason, answer: str | None = None) -> AgentJobResult:
        """Return the job's result as it stands."""
        return AgentJobResult(
            answer=answer,
            stop_reason=stop_reason,
            turns=self.turns,
            llm_steps=self.llm_steps,
            tool_calls=self.tool_calls,
            usage=self.usage,
        )

    def progress(self) -> JobProgress:
        """Return what the job is doing now."""
        return JobProgress(
            turns=self.turns,
            llm_steps=self.llm_steps,
            tool_calls=self.tool_calls,
            doing=self.doing,
            usage=self.usage,
        )
