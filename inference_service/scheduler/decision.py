"""What the scheduler decides: orders to the shell, in the imperative."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Hand these steps to the engine now, together and in this order: one cohort."""

    cohort: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Take a dispatched step out of the engine; its end is told by `StepFailed`."""

    step_id: str


@dataclass(frozen=True, slots=True)
class Reject:
    """This step can never run: `what` holds `limit` tokens, and it needs `size`."""

    step_id: str
    what: str
    size: int
    limit: int


@dataclass(frozen=True, slots=True)
class Refresh:
    """Touch the session's cached prefix, so that it is evicted later; told by `TouchDone`.

    The prompt is the first `num_tokens` tokens of the session, whole blocks and one more; one
    output token.
    """

    session: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Prewarm:
    """Compute an evicted session's prefix before it comes back; otherwise as `Refresh`."""

    session: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Shed:
    """This waiting step is not worth running any more, because of `reason`."""

    step_id: str
    reason: str


Decision = Dispatch | Abort | Reject | Refresh | Prewarm | Shed
