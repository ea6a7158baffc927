"""How a step's failures reach Temporal: retryable or not, with the message and the hint."""

from __future__ import annotations

from datetime import timedelta

from temporalio.exceptions import ApplicationError

from contracts.error import MusterError, UnavailableError


class EngineStalledError(MusterError):
    """The engine gave no token for too long; the generation was aborted."""

    retryable = True


class StaleAttemptError(MusterError):
    """Another owner has taken the step over; this attempt's tokens are waste."""

    retryable = True


class DrainingError(UnavailableError):
    """The replica is going away and hands the step back."""


class StepFaultError(MusterError):
    """Something that nobody foresaw went wrong in the step; it counts as any other failure."""

    retryable = True


class StepFailedTooOftenError(MusterError):
    """The step has used up its typed failures; it fails for good."""


def to_temporal(error: MusterError) -> ApplicationError:
    """Return the Temporal failure of one of our errors; a handed-back step is retried at once."""
    return ApplicationError(
        str(error),
        {"message": error.message, "hint": error.hint},
        type=type(error).__name__,
        non_retryable=not error.retryable,
        next_retry_delay=timedelta(milliseconds=100) if isinstance(error, DrainingError) else None,
    )
