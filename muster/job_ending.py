"""How a job has ended, as the last event of its last run tells."""

from __future__ import annotations

from collections.abc import Sequence

from temporalio.api.history.v1 import HistoryEvent

from contracts.job import AgentJobResult, JobStatus, StopReason
from contracts.message import Frozen
from muster.history import failure_hint, failure_text, first_json, parsed, time_ns


class Ending(Frozen):
    """How a job's last run stands; `at_ns` is None while it runs."""

    status: JobStatus
    at_ns: int | None = None
    result: AgentJobResult | None = None
    failure: str | None = None
    hint: str | None = None


def job_ending(events: Sequence[HistoryEvent]) -> Ending:
    """Return how the job stands after the last of the events, which are of its last run."""
    last = events[-1]
    at_ns = time_ns(last)
    match last.WhichOneof("attributes"):
        case "workflow_execution_completed_event_attributes":
            payloads = last.workflow_execution_completed_event_attributes.result
            result = parsed(AgentJobResult, first_json(payloads))
            stopped = result is not None and result.stop_reason is not StopReason.ANSWERED
            status = JobStatus.STOPPED if stopped else JobStatus.COMPLETED
            return Ending(status=status, at_ns=at_ns, result=result)
        case "workflow_execution_failed_event_attributes":
            failure = last.workflow_execution_failed_event_attributes.failure
            return Ending(
                status=JobStatus.FAILED,
                at_ns=at_ns,
                failure=failure_text(failure),
                hint=failure_hint(failure),
            )
        case "workflow_execution_timed_out_event_attributes":
            late = "the job ran longer than its execution timeout"
            return Ending(status=JobStatus.FAILED, at_ns=at_ns, failure=late)
        case "workflow_execution_canceled_event_attributes":
            return Ending(status=JobStatus.CANCELLED, at_ns=at_ns)
        case "workflow_execution_terminated_event_attributes":
            reason = last.workflow_execution_terminated_event_attributes.reason
            return Ending(status=JobStatus.TERMINATED, at_ns=at_ns, failure=reason or None)
        case _:
            return Ending(status=JobStatus.RUNNING)
