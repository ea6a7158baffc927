"""What Temporal answers to a request about jobs, in words that a person can act on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from temporalio.service import RPCError, RPCStatusCode

from contracts.error import BadInputError, MusterError, UnavailableError

AWAY = (RPCStatusCode.UNAVAILABLE, RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED)
"""What a call to a server that is down, starting or cut off ends with."""


@contextmanager
def explained(job_id: str) -> Iterator[None]:
    """Turn what Temporal answers to a request about a job into an error of ours."""
    try:
        yield
    except RPCError as error:
        if is_no_job(error):
            raise BadInputError(
                f"no job {job_id}", hint="muster jobs lists the jobs; closed ones are kept 30 days"
            ) from None
        raise refusal(error) from error


def is_no_job(error: RPCError) -> bool:
    """Say whether an answer to a request about a job means that the server has no such job."""
    return error.status is RPCStatusCode.NOT_FOUND and not _is_about_namespace(error)


def refusal(error: RPCError) -> MusterError:
    """Return the error of ours for a request that Temporal did not carry out."""
    said = " ".join(error.message.split())
    if error.status in AWAY:
        return UnavailableError(
            f"Temporal does not answer: {said}", hint="muster status, then muster up"
        )
    if error.status is RPCStatusCode.RESOURCE_EXHAUSTED:
        return UnavailableError(f"Temporal is over its limit: {said}", hint="try again in a while")
    if _is_about_namespace(error):
        hint = "create it, or set MUSTER_TEMPORAL_NAMESPACE"
    else:
        hint = "muster doctor checks every part"
    return BadInputError(f"Temporal refuses: {said}", hint=hint)


def _is_about_namespace(error: RPCError) -> bool:
    return error.status is RPCStatusCode.NOT_FOUND and "namespace" in error.message.lower()
