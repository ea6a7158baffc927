"""What the workflow of every job has: how the job stands, what people may do to it, how it ends.

A subclass says what the job is made of (`_agent`, `_state`, `_hold`) and how it looks (`_details`).
Updates append and return: what waits for them hears of it by `_changed`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import NoReturn

from temporalio import workflow
from temporalio.common import SearchAttributeKey
from temporalio.exceptions import ApplicationError, FailureError

with workflow.unsafe.imports_passed_through():
    from contracts.agent import AgentSpec
    from contracts.approval import Decision, JobWaits, PauseRequest
    from contracts.error import MusterError
    from contracts.job import JobProgress, JobStatus
    from contracts.name import (
        DECIDE_UPDATE,
        PAUSE_UPDATE,
        PROGRESS_QUERY,
        RESUME_UPDATE,
        SEARCH_STATE,
        SEARCH_WAITING_FOR,
        WAITS_QUERY,
    )
    from workflows import decision, failure, text
    from workflows.hold import Hold
    from workflows.state import JobState

MAX_HISTORY_EVENTS = 10_000
MAX_HISTORY_BYTES = 20_000_000
"""A job rolls over here where the server does not suggest it earlier (4,096 events, 4 MB); it ends
a workflow at five times the events and two and a half times the bytes."""

_WAITING_FOR = SearchAttributeKey.for_keyword_list(SEARCH_WAITING_FOR)
_STATE = SearchAttributeKey.for_keyword(SEARCH_STATE)


def history_is_long() -> bool:
    """Say whether the run's history has grown so long that the job should continue as new."""
    info = workflow.info()
    return (
        info.is_continue_as_new_suggested()
        or info.get_current_history_length() >= MAX_HISTORY_EVENTS
        or info.get_current_history_size() >= MAX_HISTORY_BYTES
    )


class JobWorkflow(ABC):
    """The base of `AgentWorkflow` and `PlanWorkflow`."""

    _agent: AgentSpec
    _state: JobState
    _hold: Hold
    _is_ending = False

    @abstractmethod
    def _details(self, waits: JobWaits) -> str:
        """Return how the job stands, as Markdown for the Temporal UI."""

    def _changed(self) -> None:
        """Tell what waits that a person has done something."""
        self._hold.tell()

    @workflow.query(name=PROGRESS_QUERY)
    def progress(self) -> JobProgress:
        """Return what the job is doing now."""
        return decision.progress(workflow.info().workflow_id, self._state)

    @workflow.query(name=WAITS_QUERY)
    def waits(self) -> JobWaits:
        """Return what the job waits for that only people can give."""
        return JobWaits() if self._is_ending else decision.waits(self._agent, self._state)

    @workflow.update(name=DECIDE_UPDATE)
    def decide(self, given: Decision) -> None:
        """Take a person's decision; one that is sent again is taken once."""
        decision.take_decision(given, self._agent, self._state)
        self._changed()

    @decide.validator
    def _check_decide(self, given: Decision) -> None:
        with failure.as_refusal():
            self._refuse_if_ending("no call of it waits for a decision any more")
            decision.check_decision(given, self._agent, self._state, workflow.now())

    @workflow.update(name=PAUSE_UPDATE)
    def pause(self, request: PauseRequest) -> None:
        """Begin nothing new from now on; what runs goes on to its end."""
        decision.take_pause(request, self._state, workflow.now())
        self._changed()

    @pause.validator
    def _check_pause(self, request: PauseRequest) -> None:
        with failure.as_refusal():
            self._refuse_if_ending("it cannot be paused any more")
            decision.check_pause(request, self._state)

    @workflow.update(name=RESUME_UPDATE)
    def resume(self, request: PauseRequest) -> None:
        """Go on with a paused job."""
        decision.take_resume(request, self._state)
        self._changed()

    @resume.validator
    def _check_resume(self, request: PauseRequest) -> None:
        with failure.as_refusal():
            decision.check_resume(request, self._state)

    def _refuse_if_ending(self, what: str) -> None:
        if self._is_ending or workflow.cancellation_reason() is not None:
            raise failure.JobEndingError(f"the job is ending: {what}")

    def _say(self, doing: str) -> None:
        """Tell people what the job does now: the query and the current details of the UI."""
        self._state.doing = doing
        self._tell()

    def _tell(self) -> None:
        """Tell people how the job stands, and what it waits for that only they can give."""
        state = self._state
        workflow.set_current_details(self._details(self.waits()))
        found = [] if self._is_ending else decision.waiting_for(self._agent, state)
        if found != state.waiting_for:
            state.waiting_for = found
            workflow.upsert_search_attributes([_WAITING_FOR.value_set(found)])

    def _enter(self, status: JobStatus, doing: str) -> None:
        """Enter a state that people search for."""
        self._say(doing)
        workflow.upsert_search_attributes([_STATE.value_set(status.value)])

    def _end_badly(self, error: BaseException) -> NoReturn:
        """End the job cancelled if that was asked for, else failed with `error`."""
        if workflow.cancellation_reason() is not None:
            self._enter(JobStatus.CANCELLED, "cancelled")
            raise asyncio.CancelledError from error
        if isinstance(error, asyncio.CancelledError):
            raise error
        message = error.message if isinstance(error, MusterError | FailureError) else str(error)
        self._enter(JobStatus.FAILED, text.one_line(f"failed: {message}"))
        refused = failure.refusal(error) if isinstance(error, MusterError) else error
        if isinstance(refused, ApplicationError):
            raise failure.with_spent(refused, self._state.spent()) from error
        raise error
