"""Jobs from the client's side: start them, watch them, list them, cancel them, report on them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from pydantic_core import to_json
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import (
    Client,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowQueryFailedError,
)
from temporalio.common import (
    Priority,
    WorkflowIDReusePolicy,
)
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from contracts.agent import AgentSpec
from contracts.approval import JobWaits
from contracts.error import BadInputError, LimitExceededError, MusterError, UnavailableError
from contracts.job import AgentJobInput, AgentJobResult, JobMessage, JobProgress, JobStatus
from contracts.limit import MAX_START_BYTES
from contracts.llm_step import Usage
from contracts.name import (
    AGENT_WORKFLOW,
    AGENTS_QUEUE,
    PLAN_WORKFLOW,
    PROGRESS_QUERY,
    WAITS_QUERY,
)
from muster.job_error import AWAY, explained, refusal
from muster.job_history import JobHistories
from muster.job_id import check_job_id, new_job_id
from muster.job_input import check_input
from muster.job_message import send_message
from muster.job_row import (
    IDS_OF_A_QUERY,
    JobRow,
    earlier_runs_query,
    listing_query,
    row_of,
)
from muster.job_view import doing
from muster.report import JobReport
from workflows.option import TIMEOUT_GRACE, search_attributes
from workflows.plan_agent import as_agent_job
from workflows.plan_check import check_plan, check_plan_input
from workflows.plan_state import PlanRunInput

if TYPE_CHECKING:  # commands that need no database load no part of SQLAlchemy
    from muster.past import Past

MAX_SUMMARY_BYTES = 200
"""A job's summary line in the Temporal UI; Temporal's own limit is 400 bytes as JSON."""

MAX_TENANT_BYTES = 64
"""A tenant is Temporal's fairness key, which may not be longer."""

QUERY_TIMEOUT = timedelta(seconds=2)
"""How long a progress query waits for an agent worker."""

OUTAGE_LIMIT = timedelta(minutes=2)
"""How long one who watches a job waits for a Temporal server that does not answer."""

_NO_WORKER = "waiting for an agent worker"

_RETRY_S = 1.0
"""Pause before a server that does not answer is asked again."""

_ANSWERED_S = 30.0
"""A wait for a job's end that lasted this long was heard by the server: the outage is a new one."""


class JobEndedError(MusterError):
    """A job has ended without a result: `status` says how."""

    def __init__(self, job_id: str, status: JobStatus, reason: str | None, hint: str) -> None:
        super().__init__(f"job {job_id} {status}" + (f": {reason}" if reason else ""), hint=hint)
        self.job_id, self.status, self.reason = job_id, status, reason


class Jobs:
    """The jobs of one Temporal namespace; `past` knows those that the server has dropped."""

    def __init__(self, client: Client, past: Past | None = None) -> None:
        self.client = client
        self.histories = JobHistories(client, past)

    async def start(
        self,
        agent: AgentSpec,
        text: str,
        *,
        model: str,
        tenant: str = "default",
        priority: int = 3,
        deadline: datetime | None = None,
        job_id: str | None = None,
    ) -> str:
        """Start a job of `agent` on the input `text` and return its id.

        `model` is used if the agent names none. With a `job_id` of the caller's own, a second
        start with it is refused: job ids are never used again.
        """
        job = AgentJobInput(
            agent=agent,
            input=check_input(text),
            model=agent.model or model,
            tenant=_tenant(tenant),
            priority=priority,
            deadline=deadline,
        )
        return await self._start(AGENT_WORKFLOW, job, job, job_id)

    async def start_plan(self, job: PlanRunInput, *, job_id: str | None = None) -> str:
        """Start a job of a plan and return its id; raises what is wrong with plan or input."""
        check_plan(job.plan)
        check_plan_input(job.plan, job.input)
        _tenant(job.tenant)
        shown = to_json(job.input).decode()
        stands_for = as_agent_job(job).model_copy(update={"input": shown})
        return await self._start(PLAN_WORKFLOW, job, stands_for, job_id)

    async def _start(
        self,
        workflow: str,
        job: AgentJobInput | PlanRunInput,
        shown: AgentJobInput,
        job_id: str | None,
    ) -> str:
        """Start a job; `shown` says what it is found by, and its limits."""
        size = len(to_json(job))
        if size > MAX_START_BYTES:
            raise LimitExceededError(
                "the job's input, with its agent, as JSON", size, MAX_START_BYTES, "bytes",
                hint="shorten the input or the agent's instructions and examples",
            )  # fmt: skip
        job_id = check_job_id(job_id) if job_id else new_job_id()
        try:
            await self.client.start_workflow(
                workflow,
                job,
                id=job_id,
                task_queue=AGENTS_QUEUE,
                execution_timeout=shown.agent.limits.max_wall_time + TIMEOUT_GRACE,
                id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
                search_attributes=search_attributes(shown),
                static_summary=_summary(shown),
                priority=Priority(priority_key=shown.priority, fairness_key=shown.tenant),
            )
        except WorkflowAlreadyStartedError:
            raise BadInputError(
                f"job {job_id} exists already", hint="job ids are used once; leave it out"
            ) from None
        except RPCError as error:
            if error.status in AWAY:
                raise UnavailableError(
                    f"Temporal did not confirm the start of job {job_id}: {error.message}",
                    hint=f"muster show {job_id} tells whether it has started",
                ) from error
            raise refusal(error) from error
        return job_id

    async def result(self, job_id: str) -> AgentJobResult:
        """Wait for a job's end; raises `JobEndedError` if it ended without a result."""
        await self.wait(job_id)
        report = await self.report(job_id)
        if report.stop_reason is None:
            raise JobEndedError(job_id, report.status, report.failure, report.hint or "")
        return AgentJobResult(
            answer=report.answer,
            stop_reason=report.stop_reason,
            turns=report.turns,
            llm_steps=report.llm_steps,
            tool_calls=report.tool_calls,
            usage=report.usage,
        )

    async def progress(
        self, job_id: str, *, every: timedelta = timedelta(seconds=0.5)
    ) -> AsyncGenerator[JobProgress, None]:
        """Yield what the job does now, about each `every`, until it has ended.

        Workers and the server may be down meanwhile: `doing` says so, and the counts are the last
        ones known. Raises `UnavailableError` if the server is away for `OUTAGE_LIMIT`.
        """
        handle = self._handle(job_id)
        with explained(job_id):
            await handle.describe()
        closed = asyncio.create_task(self._closed(handle))
        last = JobProgress(turns=0, llm_steps=0, tool_calls=0, doing="starting", usage=Usage())
        try:
            while not closed.done():
                asking = asyncio.create_task(self._look(handle, last))
                try:
                    await asyncio.wait({asking, closed}, return_when=asyncio.FIRST_COMPLETED)
                    if asking.done():
                        last = asking.result()
                        yield last
                finally:
                    asking.cancel()
                await asyncio.wait({closed}, timeout=every.total_seconds())
            closed.result()
        finally:
            closed.cancel()

    async def send(self, job_id: str, message: JobMessage) -> None:
        """Send a message to a running job, which reads it at its next turn.

        One that is sent again under its id is read once. Raises `BadInputError` if the job refuses
        it or has ended, `UnavailableError` if nobody takes it.
        """
        await send_message(self._handle(job_id), message)

    async def cancel(self, job_id: str) -> None:
        """Ask a job to cancel itself; raises `BadInputError` if it has ended some other way."""
        status = (await self.describe(job_id)).status
        if status is JobStatus.RUNNING:
            with explained(job_id):
                await self._handle(job_id).cancel()
        elif status is not JobStatus.CANCELLED:
            raise BadInputError(
                f"job {job_id} has already ended: {status}", hint=f"muster show {job_id}"
            )

    async def waits(self, job_id: str) -> JobWaits | None:
        """Return what a running job waits for from people; None if it cannot be asked now."""
        try:
            answer: JobWaits = await self._handle(job_id).query(
                WAITS_QUERY, result_type=JobWaits, rpc_timeout=QUERY_TIMEOUT
            )
        except (RPCError, WorkflowQueryFailedError):
            return None
        return answer

    async def wait(self, job_id: str) -> None:
        """Wait until a job has ended, however it ends."""
        handle = self._handle(job_id)
        with explained(job_id):
            await handle.describe()
        await self._closed(handle)

    async def list(
        self,
        *,
        status: JobStatus | None = None,
        agent: str | None = None,
        limit: int = 20,
    ) -> list[JobRow]:
        """Return jobs, those that run first, then the last ended; at most `limit`."""
        found = self.client.list_workflows(
            listing_query(status, agent, limit), limit=limit, page_size=min(limit, 1_000)
        )
        try:
            rows = [row_of(each) async for each in found]
            starts = await self._first_starts([row.job_id for row in rows])
        except RPCError as error:
            raise refusal(error) from error
        return [row.begun(starts.get(row.job_id)) for row in rows]

    async def describe(self, job_id: str) -> JobRow:
        """Return how one job stands."""
        with explained(job_id):
            row = row_of(await self._handle(job_id).describe())
            return row.begun((await self._first_starts([job_id])).get(job_id))

    async def _first_starts(self, job_ids: Sequence[str]) -> dict[str, datetime]:
        """Return when jobs that have rolled over began, as far back as the server knows."""
        starts: dict[str, datetime] = {}
        for place in range(0, len(job_ids), IDS_OF_A_QUERY):
            query = earlier_runs_query(job_ids[place : place + IDS_OF_A_QUERY])
            async for run in self.client.list_workflows(query):
                starts[run.id] = min(run.start_time, starts.get(run.id, run.start_time))
        return starts

    async def report(self, job_id: str) -> JobReport:
        """Return a job's report, from its history as it is now."""
        return await self.histories.report(job_id)

    def _handle(self, job_id: str, run_id: str | None = None) -> WorkflowHandle[object, object]:
        return self.client.get_workflow_handle(check_job_id(job_id), run_id=run_id)

    async def _closed(self, handle: WorkflowHandle[object, object]) -> None:
        """Wait for the job's end, over outages of the server up to `OUTAGE_LIMIT`."""
        loop = asyncio.get_running_loop()
        away_since_s: float | None = None
        while True:
            asked_s = loop.time()
            try:
                await handle.result()
                return
            except WorkflowFailureError:
                return
            except RPCError as error:
                if error.status not in AWAY:
                    raise refusal(error) from error
                if away_since_s is None or loop.time() - asked_s > _ANSWERED_S:
                    away_since_s = asked_s
                if loop.time() - away_since_s > OUTAGE_LIMIT.total_seconds():
                    raise UnavailableError(
                        f"Temporal has not answered for {OUTAGE_LIMIT}",
                        hint=f"the job is safe; muster status, then muster show {handle.id}",
                    ) from error
                await asyncio.sleep(_RETRY_S)

    async def _look(self, handle: WorkflowHandle[object, object], last: JobProgress) -> JobProgress:
        """Return the job's progress; what no worker or server tells now stays as it was."""
        stuck, pending = _NO_WORKER, tuple[PendingActivityInfo, ...]()
        try:
            described = (await handle.describe(rpc_timeout=QUERY_TIMEOUT)).raw_description
            pending = tuple(described.pending_activities)
            if described.pending_workflow_task.attempt > 1:
                attempt = described.pending_workflow_task.attempt
                stuck = f"its workflow task was not done, attempt {attempt} (see muster doctor)"
            answer: JobProgress = await handle.query(
                PROGRESS_QUERY, result_type=JobProgress, rpc_timeout=QUERY_TIMEOUT
            )
        except RPCError as error:
            if error.status is RPCStatusCode.UNAVAILABLE:
                return last.model_copy(update={"doing": "waiting for Temporal to answer"})
            return last.model_copy(update={"doing": doing(stuck, pending)})
        except WorkflowQueryFailedError:
            return last.model_copy(update={"doing": doing(stuck, pending)})
        return answer.model_copy(update={"doing": doing(answer.doing, pending)})


def _tenant(tenant: str) -> str:
    size = len(tenant.encode())
    if not 1 <= size <= MAX_TENANT_BYTES or not tenant.isprintable():
        raise BadInputError(
            f"tenant {tenant[:80]!r} is not a name of 1 to {MAX_TENANT_BYTES} bytes",
            hint="--tenant names who the job is for",
        )
    return tenant


def _summary(job: AgentJobInput) -> str:
    """Return the line that names the job in the Temporal UI: its agent and its input."""
    text = " ".join(f"{job.agent.name}: {job.input[:MAX_SUMMARY_BYTES]}".split())
    text = "".join(char if char.isprintable() else " " for char in text)
    whole = text
    while len(json.dumps(text)) > MAX_SUMMARY_BYTES:
        text = text[:-1]
    return text if text == whole else text + "…"
