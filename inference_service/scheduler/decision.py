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
    """This step can never run: it has `size` tokens, the limit is `limit` tokens."""

    step_id: str
    what: str
    size: int
    limit: int


Decision = Dispatch | Abort | Reject
