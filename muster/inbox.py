"""What running jobs wait for that only people can give: calls to approve, pauses to end."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio.client import (
    Client,
    WorkflowExecution,
    WorkflowHandle,
    WorkflowQueryFailedError,
)
from temporalio.service import RPCError, RPCStatusCode

from contracts.approval import Decision, JobWaits, PauseRequest, PendingApproval
from contracts.error import BadInputError, UnavailableError
from contracts.message import Frozen
from contracts.name import (
    DECIDE_UPDATE,
    JOB_WORKFLOWS,
    PAUSE_UPDATE,
    RESUME_UPDATE,
    SEARCH_TENANT,
    SEARCH_WAITING_FOR,
    WAITS_FOR_ANYONE,
    WAITS_FOR_APPROVAL,
    WAITS_QUERY,
    waits_for_person,
)
from muster.job_error import AWAY, explained, refusal
from muster.job_id import check_job_id
from muster.job_row import row_of
from muster.job_update import deliver

MAX_JOBS = 200
"""Jobs that one look at the inbox asks what they wait for."""

ASKED_AT_ONCE = 16

QUERY_TIMEOUT = timedelta(seconds=5)
"""How long a job is given to say what it waits for."""


class InboxEntry(Frozen):
    """A call that waits for approval, and whose it is."""

    job_id: str
    agent: str | None
    tenant: str | None
    call: PendingApproval


class Inbox(Frozen):
    """Calls that wait for approval, those asked first first.

    `silent` are jobs that wait, and could not be asked for what. `has_more` says that more jobs
    wait than were looked at.
    """

    entries: tuple[InboxEntry, ...] = ()
    silent: tuple[str, ...] = ()
    has_more: bool = False


class People:
    """What people do with running jobs: look at what waits, decide, pause and resume."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def inbox(self, *, person: str | None = None, tenant: str | None = None) -> Inbox:
        """Return what waits for approval in all jobs, or for that of one person, or of a tenant.

        Raises `BadInputError` for a bad filter, `UnavailableError` if Temporal does not answer.
        """
        query = inbox_query(person, tenant)
        try:
            pages = self._client.list_workflows(query, limit=MAX_JOBS + 1)
            jobs = [each async for each in pages]
        except RPCError as error:
            raise refusal(error) from error
        free = asyncio.Semaphore(ASKED_AT_ONCE)
        asked = await asyncio.gather(*(self._look(job, free) for job in jobs[:MAX_JOBS]))
        entries = [each for found in asked if found is not None for each in found]
        if person is not None:
            entries = [each for each in entries if _may_decide(person, each.call)]
        return Inbox(
            entries=tuple(sorted(entries, key=lambda each: each.call.asked_at)),
            silent=tuple(job.id for job, found in zip(jobs, asked, strict=False) if found is None),
            has_more=len(jobs) > MAX_JOBS,
        )

    async def waits(self, job_id: str) -> JobWaits:
        """Return what one job waits for; raises `UnavailableError` if no worker can tell."""
        with explained(job_id):
            await self._handle(job_id).describe()
        try:
            return await self._ask(job_id)
        except (RPCError, WorkflowQueryFailedError) as error:
            raise UnavailableError(
                f"job {job_id} cannot be asked what it waits for", hint="muster doctor"
            ) from error

    async def find_call(self, job_id: str, named: str | None) -> PendingApproval:
        """Return the one call of a job that waits and is `named`: its id, an end of it, its tool.

        Without a name, the only one. Raises `BadInputError` if there is none, or several.
        """
        pending = (await self.waits(job_id)).pending
        found = [each for each in pending if named is None or _is_named(each, named)]
        exact = [each for each in found if each.call_id == named]
        if len(found) == 1 or exact:
            return (exact or found)[0]
        ids = ", ".join(f"{each.call_id} ({each.tool})" for each in pending[:5])
        more = ", …" if len(pending) > 5 else ""
        if found:
            which = f" named {named!r}" if named is not None else ""
            raise BadInputError(
                f"{len(found)} calls{which} of job {job_id} wait for approval",
                hint=f"name one: {ids}{more}",
            )
        if not pending:
            raise BadInputError(
                f"no call of job {job_id} waits for approval",
                hint=f"muster approvals lists all that wait; muster show {job_id}",
            )
        raise BadInputError(
            f"no call named {named!r} of job {job_id} waits for approval",
            hint=f"these wait: {ids}{more}",
        )

    async def decide(self, job_id: str, decision: Decision) -> None:
        """Send a decision; one that is sent again under its id counts once.

        Raises `BadInputError` if the job refuses it or has ended, `UnavailableError` if nobody
        takes it.
        """
        await deliver(self._handle(job_id), DECIDE_UPDATE, decision, "decision")

    async def pause(self, job_id: str, request: PauseRequest) -> None:
        """Pause a job; raises as `decide` does."""
        await deliver(self._handle(job_id), PAUSE_UPDATE, request, "pause")

    async def resume(self, job_id: str, request: PauseRequest) -> None:
        """Let a paused job go on; raises as `decide` does."""
        await deliver(self._handle(job_id), RESUME_UPDATE, request, "resumption")

    async def _look(
        self, job: WorkflowExecution, free: asyncio.Semaphore
    ) -> list[InboxEntry] | None:
        """Return what a job waits for; None if it cannot be asked."""
        row = row_of(job)
        async with free:
            try:
                waits = await self._ask(job.id)
            except WorkflowQueryFailedError:
                return None
            except RPCError as error:
                if error.status is RPCStatusCode.NOT_FOUND:
                    return []
                if error.status in (*AWAY, RPCStatusCode.FAILED_PRECONDITION):
                    return None
                raise refusal(error) from error
        return [
            InboxEntry(job_id=job.id, agent=row.agent, tenant=row.tenant, call=each)
            for each in waits.pending
        ]

    async def _ask(self, job_id: str) -> JobWaits:
        answer: JobWaits = await self._handle(job_id).query(
            WAITS_QUERY, result_type=JobWaits, rpc_timeout=QUERY_TIMEOUT
        )
        return answer

    def _handle(self, job_id: str) -> WorkflowHandle[object, object]:
        return self._client.get_workflow_handle(check_job_id(job_id))


def inbox_query(person: str | None, tenant: str | None) -> str:
    """Return the visibility query of jobs with calls that wait for approval."""
    terms = [f"WorkflowType IN {JOB_WORKFLOWS!r}", "ExecutionStatus = 'Running'"]
    if person is None:
        terms.append(f"{SEARCH_WAITING_FOR} = '{WAITS_FOR_APPROVAL}'")
    else:
        values = (_quoted(waits_for_person(person), "--for"), f"'{WAITS_FOR_ANYONE}'")
        terms.append(f"{SEARCH_WAITING_FOR} IN ({', '.join(values)})")
    if tenant is not None:
        terms.append(f"{SEARCH_TENANT} = {_quoted(tenant, '--tenant')}")
    return " AND ".join(terms)


def _quoted(text: str, option: str) -> str:
    if not text or any(char in "'\"`\\" or not char.isprintable() for char in text):
        raise BadInputError(
            f"{option} {text[:80]!r} is no name", hint="a name has no quotes or backslashes"
        )
    return f"'{text}'"


def _may_decide(person: str, call: PendingApproval) -> bool:
    return (not call.by or person in call.by) and person not in call.approved_by


def _is_named(call: PendingApproval, named: str) -> bool:
    starts_or_ends = call.call_id.startswith(named) or call.call_id.endswith(named)
    return bool(named) and (starts_or_ends or call.tool == named)
