"""Messages that a job has taken and no LLM step has been given yet, as history tells."""

from __future__ import annotations

from collections.abc import Sequence

from temporalio.api.history.v1 import HistoryEvent

from contracts.job import JobMessage
from contracts.llm_step import LLMStepInput
from contracts.message import Role
from contracts.name import LLM_STEP, MESSAGE_UPDATE
from muster.history import first_json, parsed
from workflows.state import AgentRunInput


class Unread:
    """The messages that wait, the oldest first, as a job's runs tell one after the other.

    A job reads its messages in the order in which it took them; a run begins with those that the
    run before has left.
    """

    def __init__(self) -> None:
        self.messages: list[JobMessage] = []
        self._seen: set[str] = set()

    def follow(self, events: Sequence[HistoryEvent]) -> None:
        """Take in the history of the next run."""
        begun = first_json(events[0].workflow_execution_started_event_attributes.input)
        run = parsed(AgentRunInput, begun)
        if run and run.carried:
            self.messages = list(run.carried.inbox)
            self._seen.update(run.carried.seen_messages)
        for event in events:
            message = _taken(event)
            if message and message.id not in self._seen:
                self._seen.add(message.id)
                self.messages.append(message)
            for text in _read(event):
                if self.messages and self.messages[0].text == text:
                    self.messages.pop(0)


def _taken(event: HistoryEvent) -> JobMessage | None:
    """Return the message that a job took with this event."""
    update = event.workflow_execution_update_accepted_event_attributes.accepted_request.input
    return parsed(JobMessage, first_json(update.args)) if update.name == MESSAGE_UPDATE else None


def _read(event: HistoryEvent) -> list[str]:
    """Return the users' words that an LLM step was given with this event."""
    asked = event.activity_task_scheduled_event_attributes
    if asked.activity_type.name != LLM_STEP:
        return []
    step = parsed(LLMStepInput, first_json(asked.input))
    return [message.content for message in step.append if message.role is Role.USER] if step else []
