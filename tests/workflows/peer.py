"""The other side of Temporal, scripted: open_job, llm_step and call_tool under their real names.

A script says what each LLM step of a job replies and how each tool behaves, and keeps what was
asked. LLM steps are numbered from 1 by their step id, so a retried step gets the same reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue
from temporalio import activity
from temporalio.exceptions import ApplicationError

from contracts.job import OpenJobInput, OpenJobResult
from contracts.llm_step import (
    FinishReason,
    LLMStepInput,
    LLMStepResult,
    Outcome,
    SessionHint,
    StepTiming,
    Usage,
)
from contracts.message import ContextRef, Message, Role, ToolCall
from contracts.name import CALL_TOOL, LLM_STEP, OPEN_JOB, SESSION_HINT
from contracts.tool import CallToolInput, CallToolResult, ToolOutcome

STEP_USAGE = Usage(prompt_tokens=100, cached_tokens=40, completion_tokens=10)
"""What each scripted step uses: 70 tokens that count against `max_tokens`."""

Opening = Callable[[OpenJobInput], Awaitable[OpenJobResult]]
Reply = Callable[[LLMStepInput], Awaitable[LLMStepResult]]
Tool = Callable[[CallToolInput], Awaitable[CallToolResult]]


def finished(step: LLMStepInput, message: Message | None) -> LLMStepResult:
    """Return the result of a step that finished with `message`."""
    return LLMStepResult(
        step_id=step.step_id,
        outcome=Outcome.FINISHED,
        context=ContextRef(head=f"after {step.step_id}", token_run=step.step_id),
        message=message,
        finish_reason=FinishReason.STOP,
        usage=STEP_USAGE,
        timing=StepTiming(prefill_s=0.25, decode_s=0.5),
        replica="engine-0",
        epoch=1,
    )


def says(text: str) -> Reply:
    """Reply with an answer."""

    async def reply(step: LLMStepInput) -> LLMStepResult:
        return finished(step, Message(role=Role.ASSISTANT, content=text))

    return reply


def calls(*asked: tuple[str, dict[str, JsonValue]], ids: Sequence[str] = ()) -> Reply:
    """Reply with tool calls, each a tool's name and its arguments."""

    async def reply(step: LLMStepInput) -> LLMStepResult:
        tool_calls = tuple(
            ToolCall(
                id=ids[place] if ids else f"{step.step_id}/{place}", tool=tool, arguments=arguments
            )
            for place, (tool, arguments) in enumerate(asked)
        )
        return finished(step, Message(role=Role.ASSISTANT, content="", tool_calls=tool_calls))

    return reply


def answered(call: CallToolInput, content: str) -> CallToolResult:
    """Return the result of a tool call that went well."""
    return CallToolResult(
        call_id=call.call.id, outcome=ToolOutcome.OK, content=content, duration_s=0.0
    )


def returns(content: str) -> Tool:
    """A tool that always returns `content`."""

    async def tool(call: CallToolInput) -> CallToolResult:
        return answered(call, content)

    return tool


def refuses(content: str) -> Tool:
    """A tool that says no."""

    async def tool(call: CallToolInput) -> CallToolResult:
        return CallToolResult(
            call_id=call.call.id, outcome=ToolOutcome.ERROR, content=content, duration_s=0.0
        )

    return tool


def raises(message: str, *details: str, kind: str = "PermanentToolError") -> Tool:
    """A tool that fails for good."""

    async def tool(call: CallToolInput) -> CallToolResult:
        raise ApplicationError(message, *details, type=kind, non_retryable=True)

    return tool


async def opens(opening: OpenJobInput) -> OpenJobResult:
    """Open a job the usual way."""
    return OpenJobResult(context=ContextRef(head=f"opening of {opening.job_id}"), toolset="tools")


@dataclass
class Script:
    """What happens to one job, and what the job asked for."""

    replies: Sequence[Reply]
    tools: dict[str, Tool] = field(default_factory=dict)
    opening: Opening = opens
    openings: int = 0
    steps: list[LLMStepInput] = field(default_factory=list)
    step_queues: list[str] = field(default_factory=list)
    tool_calls: list[CallToolInput] = field(default_factory=list)
    hints: list[SessionHint] = field(default_factory=list)
    sub_agents: dict[str, Script] = field(default_factory=dict)
    """By the name of the agent that the job calls."""


@dataclass
class Gate:
    """A place where an activity stands until it is opened or cancelled."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def stand(self) -> None:
        """Say that the gate is reached; return when it is opened."""
        self.reached.set()
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def step(self, then: Reply) -> Reply:
        """Reply as `then`, once opened; when cancelled, return that with its usage."""

        async def reply(step: LLMStepInput) -> LLMStepResult:
            try:
                await self.stand()
            except asyncio.CancelledError:
                return finished(step, None).model_copy(
                    update={"outcome": Outcome.CANCELLED, "context": step.base}
                )
            return await then(step)

        return reply

    def tool(self, then: Tool) -> Tool:
        """Behave as `then`, once opened."""

        async def tool(call: CallToolInput) -> CallToolResult:
            await self.stand()
            return await then(call)

        return tool


class Peer:
    """The activities, for the jobs that have a script."""

    def __init__(self) -> None:
        self.scripts: dict[str, Script] = {}

    def _script(self, job_id: str) -> Script:
        if job_id not in self.scripts:
            raise ApplicationError(f"no script for {job_id}", non_retryable=True)
        return self.scripts[job_id]

    @activity.defn(name=OPEN_JOB)
    async def open_job(self, opening: OpenJobInput) -> OpenJobResult:
        """Open a job as its script says; a sub-agent's is part of its caller's."""
        if opening.job_id not in self.scripts:
            callers = [name for name in self.scripts if opening.job_id.startswith(f"{name}-")]
            if callers:
                caller = self.scripts[max(callers, key=len)]
                self.scripts[opening.job_id] = caller.sub_agents[opening.agent.name]
        script = self._script(opening.job_id)
        script.openings += 1
        return await script.opening(opening)

    @activity.defn(name=LLM_STEP)
    async def llm_step(self, step: LLMStepInput) -> LLMStepResult:
        """Reply as the script says for the step of that number."""
        script = self._script(step.job_id)
        script.steps.append(step)
        script.step_queues.append(activity.info().task_queue)
        number = int(step.step_id.rpartition("/")[2])
        return await script.replies[number - 1](step)

    @activity.defn(name=SESSION_HINT)
    async def session_hint(self, hint: SessionHint) -> None:
        """Keep the hint."""
        self._script(hint.job_id).hints.append(hint)

    @activity.defn(name=CALL_TOOL)
    async def call_tool(self, call: CallToolInput) -> CallToolResult:
        """Behave as the script says for that tool."""
        script = self._script(call.job_id)
        script.tool_calls.append(call)
        return await script.tools[call.call.tool](call)
