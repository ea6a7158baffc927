"""How a step's failures reach Temporal: retryable or not, with the message and the hint."""

from __future__ import annotations

from datetime import timedelta

from temporalio.exceptions import ApplicationError

from contracts.error import MusterError, UnavailableError

MAX_TEXT_CHARS = 4_000
"""Error text that the event history and people get."""


class EngineStalledError(MusterError):
    """The engine gave no token for too long; the generation was aborted."""

    retryable = True


class StaleAttemptError(MusterError):
    """Another owner has taken the step over; this attempt's tokens are waste."""

    retryable = True


class DrainingError(UnavailableError):
    """The replica is going away and hands the step back."""


class StaleStepError(MusterError):
    """Nobody would want the step's result any more: it was dropped before it ended."""


class NoProgressError(UnavailableError):
    """The engine computes nothing, or the scheduler broke; every step in it was given up."""


class OverloadedError(UnavailableError):
    """The service has no room for new sessions now; it says when to ask again."""

    def __init__(self, retry_after: timedelta) -> None:
        seconds = retry_after.total_seconds()
        super().__init__(
            f"the inference service takes no new sessions now; ask again in {seconds:.1f} s",
            hint="it is retried by itself; more replicas or a larger KV cache shorten the wait",
        )
        self.retry_after = retry_after


class StepFaultError(MusterError):
    """Something that nobody foresaw went wrong in the step; it counts as any other failure."""

    retryable = True


class StepFailedTooOftenError(MusterError):
    """The step has used up its typed failures; it fails for good."""


def to_temporal(error: MusterError) -> ApplicationError:
    """Return the Temporal failure of one of our errors.

    A handed-back step is retried at once, one that found no room when the service said.
    """
    return ApplicationError(
        bounded(str(error)),
        {"message": bounded(error.message), "hint": bounded(error.hint)},
        type=type(error).__name__,
        non_retryable=not error.retryable,
        next_retry_delay=_retry_delay(error),
    )


def bounded(text: str) -> str:
    """Return text that fits everywhere, cut with a mark."""
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]}…"


def _retry_delay(error: MusterError) -> timedelta | None:
    match error:
        case DrainingError():
            return timedelta(milliseconds=100)
        case OverloadedError():
            return error.retry_after
        case _:
            return None
