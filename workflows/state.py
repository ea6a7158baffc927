"""The state of an agent job: one serialisable object, so that a job can roll over to a new run."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json

from contracts.agent import PinnedTool
from contracts.approval import Approval, Decision, Pause, Verdict
from contracts.job import AgentJobInput, AgentJobResult, JobMessage, JobProgress, Spent, StopReason
from contracts.llm_step import LLMStepResult, Usage
from contracts.message import (
    BlobRef,
    ContextRef,
    Message,
    Role,
    ToolCall,
    is_empty,
    is_none,
)
from contracts.tool import ToolOutcome

MAX_SEEN_MESSAGES = 1_000
"""Message ids that are remembered: a client that repeats a message does so within minutes."""

MAX_SEEN_DECISIONS = 1_000
"""Ids of decisions and pauses that are remembered, for the same reason."""

MAX_LAST_ERROR_CHARS = 200
"""Of a tool's last error, for people who read why a job could go no further."""


class ToolTally(BaseModel):
    """What became of one tool's calls in this job; `calls` counts those that were really made."""

    model_config = ConfigDict(extra="forbid")

    calls: int = 0
    answers: int = 0
    last_error: str = ""


class ApprovalRequest(BaseModel):
    """What people have decided on a call so far; `verdict` is None while more is needed.

    `reason` is that of the denial. Those of approvals stand in the history alone.
    """

    model_config = ConfigDict(extra="forbid")

    asked_at: datetime
    expires_at: datetime | None = None
    note: str = ""
    approved_by: list[str] = Field(default_factory=list)
    verdict: Verdict | None = None
    denied_by: str = ""
    reason: str = ""

    def take(self, decision: Decision, people: int) -> None:
        """Count a decision that was checked; `people` must approve."""
        if decision.verdict is Verdict.DENY:
            self.verdict = Verdict.DENY
            self.denied_by, self.reason = decision.by, decision.reason
            return
        self.approved_by.append(decision.by)
        if len(self.approved_by) >= people:
            self.verdict = Verdict.APPROVE


class OpenCall(BaseModel):
    """A call of the last assistant message; `answer` is what the model will read, once known.

    With a `blob`, that is what it will read, and `answer` is a preview.

    `reschedules` counts how often it was scheduled again because its workers were lost. With a
    `request` it needs approval; `is_cleared` says that it has it, or was found to need none. A
    `policy` of its own stands before that of its tool. `outcome` says how it has ended.
    """

    model_config = ConfigDict(extra="forbid")

    call: ToolCall
    answer: str | None = None
    blob: BlobRef | None = None
    reschedules: int = 0
    request: ApprovalRequest | None = None
    is_cleared: bool = False
    policy: Approval | None = Field(None, exclude_if=is_none)
    outcome: ToolOutcome | None = Field(None, exclude_if=is_none)

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for people to decide on it."""
        return self.answer is None and self.request is not None and self.request.verdict is None


class JobState(BaseModel):
    """Everything an agent job knows when none of its activities runs.

    The conversation is the stored `context`, then the answers to `calls`, then `pending`, which no
    LLM step has committed yet, then `inbox`: messages that were sent to the job and wait for the
    next turn; `reading` are the ids of those among the pending. `pinned` are the tools that its
    agent's servers had when it opened. `branch` and `next_step` make step ids. The branch is the
    end of a run id, and each run has its own: the beginning of a run id is a clock, which two runs
    of one job can share. `attained_s` is the engine time used so far, in seconds. `is_out` says
    that the last step asked for tools, so the inference service waits for the next; `is_idle`, that
    it was told not to. `waiting_for` is what the job can be found by while it waits for people;
    `waited_s` is the time in seconds during which nothing but people was waited for.
    """

    model_config = ConfigDict(extra="forbid")

    branch: str
    deadline: datetime
    context: ContextRef | None = None
    toolset: str | None = None
    pinned: list[PinnedTool] = Field(default_factory=list)
    calls: list[OpenCall] = Field(default_factory=list)
    pending: list[Message] = Field(default_factory=list)
    inbox: list[JobMessage] = Field(default_factory=list)
    reading: list[str] = Field(default_factory=list, exclude_if=is_empty)
    seen_messages: list[str] = Field(default_factory=list)
    next_step: int = 1
    turns: int = 0
    llm_steps: int = 0
    tool_calls: int = 0
    usage: Usage = Usage()
    attained_s: float = 0.0
    is_out: bool = False
    is_idle: bool = False
    seen_decisions: list[str] = Field(default_factory=list)
    paused: Pause | None = None
    waiting_for: list[str] = Field(default_factory=list)
    waited_s: float = 0.0
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
        self.reading = []

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
            tally.last_error = content[:MAX_LAST_ERROR_CHARS]

    def count_sub_agent(self, spent: Spent | AgentJobResult) -> None:
        """Account for what a sub-agent has used."""
        self.llm_steps += spent.llm_steps
        self.tool_calls += spent.tool_calls
        self.usage = self.usage + spent.usage
        self.attained_s += spent.engine_s

    def receive(self, message: JobMessage) -> None:
        """Keep a message for the next turn, unless it has come before."""
        if message.id not in self.seen_messages:
            self.seen_messages = [*self.seen_messages, message.id][-MAX_SEEN_MESSAGES:]
            self.inbox.append(message)

    def has_seen(self, decision_id: str) -> bool:
        """Remember the id of a decision or a pause; say whether it has come before."""
        if decision_id in self.seen_decisions:
            return True
        self.seen_decisions = [*self.seen_decisions, decision_id][-MAX_SEEN_DECISIONS:]
        return False

    def read_inbox(self, max_bytes: int) -> None:
        """Move messages, the oldest first, behind the pending ones: at least one, if any waits."""
        size = len(to_json(self.pending))
        while self.inbox:
            size += len(to_json(self.inbox[0].text))
            if self.pending and size > max_bytes:
                return
            message = self.inbox.pop(0)
            self.pending.append(Message(role=Role.USER, content=message.text))
            self.reading.append(message.id)

    def result(self, stop_reason: StopReason, answer: str | None = None) -> AgentJobResult:
        """Return the job's result as it stands."""
        return AgentJobResult(
            answer=answer,
            stop_reason=stop_reason,
            turns=self.turns,
            llm_steps=self.llm_steps,
            tool_calls=self.tool_calls,
            usage=self.usage,
            engine_s=self.attained_s,
            waited_s=self.waited_s,
            unread=(*self.reading, *(message.id for message in self.inbox)),
        )

    def spent(self) -> Spent:
        """Return what the job has used so far."""
        return Spent(
            llm_steps=self.llm_steps,
            tool_calls=self.tool_calls,
            usage=self.usage,
            engine_s=self.attained_s,
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


class AgentRunInput(AgentJobInput):
    """What one run of `AgentWorkflow` starts with: the job, and what the run before has left.

    `input` is only a preview of the job's then: the whole is in the conversation.
    """

    carried: JobState | None = None
