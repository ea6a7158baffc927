"""Temporal histories written by hand, event by event, as a server would have written them."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel
from pydantic_core import to_json
from temporalio.api.common.v1 import Payload, Payloads
from temporalio.api.enums.v1 import EventType
from temporalio.api.failure.v1 import Failure
from temporalio.api.history.v1 import HistoryEvent

from contracts.agent import AgentSpec
from contracts.job import AgentJobInput, AgentJobResult, StopReason
from contracts.llm_step import (
    FinishReason,
    LLMStepInput,
    LLMStepResult,
    Outcome,
    StepTiming,
    Usage,
)
from contracts.message import ContextRef, Message, Role, ToolCall
from contracts.name import CALL_TOOL, LLM_STEP
from contracts.tool import CallToolInput, CallToolResult, ToolOutcome

EPOCH_NS = 1_800_000_000 * 10**9
JOB_ID = "job-01"


def payloads(value: BaseModel | None) -> Payloads:
    """Return a value as the pydantic data converter writes it."""
    return Payloads(payloads=[Payload(metadata={"encoding": b"json/plain"}, data=to_json(value))])


def failed(message: str, kind: str = "ToolError", *, hint: str = "") -> Failure:
    """Return an application failure."""
    failure = Failure(message=message)
    failure.application_failure_info.type = kind
    if hint:
        failure.application_failure_info.details.payloads.append(
            Payload(metadata={"encoding": b"json/plain"}, data=to_json(hint))
        )
    return failure


class Past:
    """The history of one run, growing. Times are in seconds after the job's start."""

    def __init__(self, text: str = "What to wear?", continued_from: str = "") -> None:
        self.events: list[HistoryEvent] = []
        started = self._event(EventType.EVENT_TYPE_WORKFLOW_EXECUTION_STARTED, 0.0)
        job = AgentJobInput(
            agent=AgentSpec(name="weather", instructions="Say."), input=text, model="tiny"
        )
        attributes = started.workflow_execution_started_event_attributes
        attributes.input.CopyFrom(payloads(job))
        attributes.continued_execution_run_id = continued_from
        self._steps = 0
        self._calls = 0

    def _event(self, kind: EventType.ValueType, at_s: float) -> HistoryEvent:
        event = HistoryEvent(event_id=len(self.events) + 1, event_type=kind)
        event.event_time.FromNanoseconds(EPOCH_NS + round(at_s * 1e9))
        self.events.append(event)
        return event

    def schedule(self, name: str, argument: BaseModel, at_s: float) -> int:
        """Schedule an activity; return its scheduled event's id."""
        event = self._event(EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED, at_s)
        attributes = event.activity_task_scheduled_event_attributes
        attributes.activity_id = str(event.event_id)
        attributes.activity_type.name = name
        attributes.input.CopyFrom(payloads(argument))
        return event.event_id

    def step(self, at_s: float) -> int:
        """Schedule the next LLM step."""
        self._steps += 1
        argument = LLMStepInput(
            step_id=f"{JOB_ID}/0/{self._steps}",
            job_id=JOB_ID,
            model="tiny",
            base=None,
            append=(Message(role=Role.USER, content="hi"),),
        )
        return self.schedule(LLM_STEP, argument, at_s)

    def call(self, at_s: float, tool: str = "find", **arguments: str) -> int:
        """Schedule the next tool call."""
        self._calls += 1
        ref = {"function": f"shop.tools:{tool}"}
        call = ToolCall(id=f"c{self._calls}", tool=tool, arguments=dict(arguments))
        argument = CallToolInput.model_validate({"job_id": JOB_ID, "call": call, "tool": ref})
        return self.schedule(CALL_TOOL, argument, at_s)

    def start(
        self, activity: int, at_s: float, *, attempt: int = 1, after: Failure | None = None
    ) -> None:
        """Start an activity's last attempt."""
        event = self._event(EventType.EVENT_TYPE_ACTIVITY_TASK_STARTED, at_s)
        attributes = event.activity_task_started_event_attributes
        attributes.scheduled_event_id = activity
        attributes.attempt = attempt
        if after is not None:
            attributes.last_failure.CopyFrom(after)

    def complete(self, activity: int, result: BaseModel | None, at_s: float) -> None:
        """Complete an activity."""
        event = self._event(EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED, at_s)
        attributes = event.activity_task_completed_event_attributes
        attributes.scheduled_event_id = activity
        attributes.result.CopyFrom(payloads(result))

    def fail(self, activity: int, failure: Failure, at_s: float) -> None:
        """Fail an activity for good."""
        event = self._event(EventType.EVENT_TYPE_ACTIVITY_TASK_FAILED, at_s)
        attributes = event.activity_task_failed_event_attributes
        attributes.scheduled_event_id = activity
        attributes.failure.CopyFrom(failure)

    def time_out(self, activity: int, failure: Failure, at_s: float) -> None:
        """Let an activity time out."""
        event = self._event(EventType.EVENT_TYPE_ACTIVITY_TASK_TIMED_OUT, at_s)
        attributes = event.activity_task_timed_out_event_attributes
        attributes.scheduled_event_id = activity
        attributes.failure.CopyFrom(failure)

    def answer(self, text: str | None, at_s: float, *, stop: StopReason | None = None) -> None:
        """Complete the job."""
        result = AgentJobResult(
            answer=text,
            stop_reason=stop or StopReason.ANSWERED,
            turns=self._steps,
            llm_steps=self._steps,
            tool_calls=self._calls,
            usage=Usage(),
        )
        event = self._event(EventType.EVENT_TYPE_WORKFLOW_EXECUTION_COMPLETED, at_s)
        event.workflow_execution_completed_event_attributes.result.CopyFrom(payloads(result))

    def break_down(self, failure: Failure, at_s: float) -> None:
        """Fail the job."""
        event = self._event(EventType.EVENT_TYPE_WORKFLOW_EXECUTION_FAILED, at_s)
        event.workflow_execution_failed_event_attributes.failure.CopyFrom(failure)

    def time_out_job(self, at_s: float) -> None:
        """Let the job exceed its execution timeout."""
        event = self._event(EventType.EVENT_TYPE_WORKFLOW_EXECUTION_TIMED_OUT, at_s)
        event.workflow_execution_timed_out_event_attributes.SetInParent()

    def cancel(self, at_s: float) -> None:
        """End the job cancelled."""
        event = self._event(EventType.EVENT_TYPE_WORKFLOW_EXECUTION_CANCELED, at_s)
        event.workflow_execution_canceled_event_attributes.SetInParent()

    def terminate(self, reason: str, at_s: float) -> None:
        """Terminate the job."""
        event = self._event(EventType.EVENT_TYPE_WORKFLOW_EXECUTION_TERMINATED, at_s)
        event.workflow_execution_terminated_event_attributes.reason = reason


def step_result(
    timing: StepTiming,
    *,
    calls: Sequence[ToolCall] = (),
    cohort_size: int = 1,
    outcome: Outcome = Outcome.FINISHED,
) -> LLMStepResult:
    """Return what a step of 100 prompt, 40 cached and 10 generated tokens returns."""
    finished = outcome is Outcome.FINISHED
    message = Message(role=Role.ASSISTANT, content="text", tool_calls=tuple(calls))
    return LLMStepResult(
        step_id=f"{JOB_ID}/0/1",
        outcome=outcome,
        context=ContextRef(head="head"),
        message=message if finished else None,
        finish_reason=FinishReason.STOP if finished else FinishReason.ABORT,
        usage=Usage(prompt_tokens=100, cached_tokens=40, completion_tokens=10),
        timing=timing,
        replica="engine-0",
        epoch=1,
        cohort_size=cohort_size,
    )


def call_result(duration_s: float, outcome: ToolOutcome = ToolOutcome.OK) -> CallToolResult:
    """Return what a tool call returns."""
    return CallToolResult(call_id="c1", outcome=outcome, content="found", duration_s=duration_s)
