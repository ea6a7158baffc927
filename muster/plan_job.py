"""Jobs of plans from the client's side: how their nodes stand, and another try after a failure."""

from __future__ import annotations

import json
from datetime import timedelta

from pydantic import JsonValue
from temporalio.client import WorkflowQueryFailedError
from temporalio.service import RPCError

from contracts.error import BadInputError, UnavailableError
from contracts.job import JobStatus
from contracts.name import PLAN_QUERY, PLAN_STATE_QUERY
from contracts.plan import Plan
from contracts.plan_job import PlanJobStart, PlanProgress
from muster.history import first_json, parsed
from muster.job import Jobs
from muster.job_error import explained
from muster.job_input import check_input
from workflows.plan_state import BodyState, PlanRunInput, reset_failed

QUERY_TIMEOUT = timedelta(seconds=10)
"""How long a query waits for an agent worker; one of a closed job replays it."""


def read_plan_input(plan: Plan, text: str) -> dict[str, JsonValue]:
    """Return the input of a plan from its JSON text; raises BadInputError."""
    try:
        given: JsonValue = json.loads(check_input(text))
    except ValueError as error:
        raise BadInputError(
            f"the input of plan {plan.name!r} is no JSON: {error}", hint=_example(plan)
        ) from None
    if not isinstance(given, dict):
        raise BadInputError(
            f"the input of plan {plan.name!r} is no JSON object", hint=_example(plan)
        )
    return given


def _example(plan: Plan) -> str:
    properties = plan.input.get("properties")
    keys = list(properties) if isinstance(properties, dict) else []
    return f"write it as {json.dumps(dict.fromkeys(keys, '…'), ensure_ascii=False)}"


def next_try(job_id: str) -> str:
    """Return the id of the job that takes a failed one over: `job-…-try2`, `job-…-try3`, …"""
    first, mark, number = job_id.rpartition("-try")
    if mark and number.isdecimal():
        return f"{first}-try{int(number) + 1}"
    return f"{job_id}-try2"


class PlanJobs:
    """The jobs of plans in one Temporal namespace."""

    def __init__(self, jobs: Jobs) -> None:
        self._client = jobs.client
        self._jobs = jobs

    async def progress(self, job_id: str) -> PlanProgress | None:
        """Return how the nodes of a job's plan stand; None if it has none, or nobody tells."""
        try:
            answer: PlanProgress = await self._client.get_workflow_handle(job_id).query(
                PLAN_QUERY, result_type=PlanProgress, rpc_timeout=QUERY_TIMEOUT
            )
        except (RPCError, WorkflowQueryFailedError):
            return None
        return answer

    async def retry(self, job_id: str) -> str:
        """Start a job that does what a failed one has not done; return its id.

        That is the same each time, so a job is retried once. Raises `BadInputError` for a job that
        is no plan's or has not failed, `UnavailableError` if no agent worker tells what it has
        done.
        """
        described = await self._jobs.describe(job_id)
        if described.status in (JobStatus.RUNNING, JobStatus.COMPLETED):
            raise BadInputError(
                f"job {job_id} is {described.status}: only what has not come to its end is retried",
                hint=f"muster show {job_id}",
            )
        history = await self._jobs.histories.read(job_id)
        started = history.runs[0].events[0].workflow_execution_started_event_attributes
        job = parsed(PlanJobStart, first_json(started.input))
        if job is None:
            raise BadInputError(
                f"job {job_id} is no plan's", hint="an agent's job is started again by muster run"
            )
        left = await self._left(job_id)
        reset_failed(left)
        fields = {key: getattr(job, key) for key in type(job).model_fields if key != "deadline"}
        return await self._jobs.start_plan(
            PlanRunInput(**fields, retried=left), job_id=next_try(job_id)
        )

    async def _left(self, job_id: str) -> BodyState:
        handle = self._client.get_workflow_handle(job_id)
        try:
            with explained(job_id):
                left: BodyState = await handle.query(
                    PLAN_STATE_QUERY, result_type=BodyState, rpc_timeout=QUERY_TIMEOUT
                )
        except WorkflowQueryFailedError as error:
            raise UnavailableError(
                f"no agent worker tells what job {job_id} has done: {error}",
                hint="look at the agent workers with `muster doctor`",
            ) from error
        return left
