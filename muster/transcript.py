"""A job's conversation as the model reads it: what is stored, then what only history knows yet.

After each LLM step the store holds everything up to its assistant message, once, whatever was
retried, replayed or rolled over; the last such conversation that history names is the transcript's
first part. What came after it, the answers of tools and messages of a step that is open, is in
history until the next step stores it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import Field
from temporalio.api.history.v1 import HistoryEvent

from contracts.job import AgentJobInput, AgentJobResult, JobMessage, OpenJobResult
from contracts.llm_step import LLMStepInput, LLMStepResult, Outcome
from contracts.message import BlobRef, Frozen, Message, Role, ToolCall
from contracts.name import CALL_TOOL, LLM_STEP, OPEN_JOB
from contracts.tool import CallToolInput, CallToolResult
from muster.history import Activity, activities, first_json, parsed
from muster.job_history import JobHistories
from muster.unread import Unread
from workflows.calling import sub_job_id
from workflows.text import sub_agent_answer


class Entry(Frozen):
    """One message of a transcript; one that is not `stored` waits for the next LLM step.

    One with a `blob` has its text in `content` if it is `whole`, else a preview.
    """

    message: Message
    stored: bool = True
    whole: bool = Field(False, exclude_if=operator.not_)


class Transcript(Frozen):
    """The conversation of a job, in order, and the calls of its last message without an answer.

    Messages with a `blob` have a preview in `content`, unless texts were asked for whole.
    """

    job_id: str
    entries: tuple[Entry, ...]
    unanswered: tuple[ToolCall, ...] = ()
    unread: tuple[JobMessage, ...] = ()
    """Messages that the job has taken and given to no LLM step."""


async def read_transcript(
    histories: JobHistories, job_id: str, *, whole: bool = False
) -> Transcript:
    """Return a job's conversation, with `whole` also of texts that the store keeps apart.

    Raises BadInputError if no database or no such job is known.
    """
    history = await histories.read(job_id)
    runs = [run.events for run in history.runs]
    tail, unread = conversation_tail(runs), Unread()
    for events in runs:
        unread.follow(events)
    stored = await histories.conversation(tail.head) if tail.head else []
    entries = [Entry(message=message) for message in stored]
    entries += [Entry(message=message, stored=False) for message in tail.pending]
    if whole:
        entries = [await _whole(histories, entry) for entry in entries]
    return Transcript(
        job_id=job_id,
        entries=tuple(entries),
        unanswered=tuple(tail.unanswered),
        unread=tuple(unread.messages),
    )


async def _whole(histories: JobHistories, entry: Entry) -> Entry:
    """Return an entry with its whole text; as it is where the store no longer has that."""
    blob = entry.message.blob
    text = await histories.text(blob.digest) if blob else None
    if text is None:
        return entry
    message = entry.message.model_copy(update={"content": text})
    return entry.model_copy(update={"message": message, "whole": True})


@dataclass(frozen=True, slots=True)
class Tail:
    """The last stored conversation that history names, and what came after it."""

    head: str | None
    pending: Sequence[Message] = ()
    unanswered: Sequence[ToolCall] = field(default_factory=tuple)


def conversation_tail(runs: Sequence[Sequence[HistoryEvent]]) -> Tail:
    """Return the end of a conversation from the histories of a job's runs, oldest first."""
    found = [activity for events in runs for activity in activities(events)]
    steps = [activity for activity in found if activity.name == LLM_STEP and not activity.is_remote]
    if not steps:
        return _opening(found, runs[0][0])
    asked = parsed(LLMStepInput, steps[-1].argument)
    result = parsed(LLMStepResult, steps[-1].result)
    if result and result.outcome is Outcome.FINISHED and result.context and result.message:
        calls = result.message.tool_calls
        later, job_id = found[found.index(steps[-1]) :], asked.job_id if asked else ""
        answers = _answers(later, {call.id: call for call in calls})
        answers |= _sub_agents_answers(later, {sub_job_id(job_id, call.id): call for call in calls})
        return Tail(
            head=result.context.head,
            pending=[answers[call.id] for call in calls if call.id in answers],
            unanswered=[call for call in calls if call.id not in answers],
        )
    if asked is None:
        return Tail(head=None)
    return Tail(head=asked.base.head if asked.base else None, pending=asked.append)


def _opening(found: Iterable[Activity], started: HistoryEvent) -> Tail:
    """Return the conversation of a job that has not asked for an LLM step yet."""
    opened = [parsed(OpenJobResult, each.result) for each in found if each.name == OPEN_JOB]
    payloads = started.workflow_execution_started_event_attributes.input
    job = parsed(AgentJobInput, first_json(payloads))
    pending = [Message(role=Role.USER, content=job.input)] if job else []
    return Tail(head=opened[-1].context.head if opened and opened[-1] else None, pending=pending)


def _answers(found: Iterable[Activity], wanted: Mapping[str, ToolCall]) -> dict[str, Message]:
    """Return the tool messages that answer the wanted calls, by call id."""
    answers: dict[str, Message] = {}
    for activity in found:
        call_id, told = _told(activity)
        if (call := wanted.get(call_id)) is None:
            continue
        if activity.closed_ns is None:  # made again, after its workers were lost
            answers.pop(call_id, None)
        else:
            content, blob = told or (f"error: {activity.failure}", None)
            answers[call_id] = Message(
                role=Role.TOOL, content=content, tool_call_id=call_id, tool=call.tool, blob=blob
            )
    return answers


def _sub_agents_answers(
    found: Iterable[Activity], asked: Mapping[str, ToolCall]
) -> dict[str, Message]:
    """Return the tool messages with what sub-agents have answered, by call id.

    `asked` has the calls by the ids of the jobs that they make.
    """
    answers: dict[str, Message] = {}
    for activity in found:
        call = asked.get(activity.activity_id)
        if call is None or activity.closed_ns is None:
            continue
        result = parsed(AgentJobResult, activity.result)
        content = sub_agent_answer(result)[0] if result else f"error: {activity.failure}"
        answers[call.id] = Message(
            role=Role.TOOL, content=content, tool_call_id=call.id, tool=call.tool
        )
    return answers


def _told(activity: Activity) -> tuple[str, tuple[str, BlobRef | None] | None]:
    """Return which call an activity makes, if any, and what it has answered, if it has."""
    if activity.is_remote:
        text = activity.text
        return activity.activity_id, None if text is None else (text, None)
    asked = parsed(CallToolInput, activity.argument) if activity.name == CALL_TOOL else None
    result = parsed(CallToolResult, activity.result)
    return asked.call.id if asked else "", (result.content, result.blob) if result else None
