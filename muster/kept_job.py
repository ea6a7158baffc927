"""Which jobs are live or kept: what they hold must not be collected."""

from __future__ import annotations

from temporalio.client import Client
from temporalio.service import RPCError

from contracts.error import BadInputError
from muster.job_error import refusal

PAGE_SIZE = 1_000


async def kept_job_ids(client: Client) -> set[str]:
    """Return the ids of all jobs that Temporal lists, whatever their state, all runs.

    Raises UnavailableError or BadInputError if it does not answer to the end: a job that is not
    listed counts as gone. No job at all is refused too, since that is what a wrong namespace shows.
    """
    try:
        kept = {job.id async for job in client.list_workflows(page_size=PAGE_SIZE)}
    except RPCError as error:
        raise refusal(error) from error
    if not kept:
        raise BadInputError(
            f"Temporal's namespace {client.namespace!r} lists no job, so all content would go",
            hint="is MUSTER_TEMPORAL_NAMESPACE the one of this database? if so, run a job first",
        )
    return kept
