"""The errors a person can act on: each names the thing, the value and the limit, then a hint."""


class MusterError(Exception):
    """Base of every error of ours that reaches a user.

    `hint` says what to do next; `retryable` says whether the same call may succeed later. Both
    travel to Temporal as the failure's details and `non_retryable` flag.
    """

    retryable = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message


class BadInputError(MusterError):
    """The caller's input is wrong and stays wrong: a file, a value, a size."""


class LimitExceededError(MusterError):
    """A named limit was reached: `what` has `size`, the limit is `limit` (all in `unit`)."""

    def __init__(self, what: str, size: int, limit: int, unit: str, *, hint: str = "") -> None:
        super().__init__(f"{what} has {size:,} {unit}, the limit is {limit:,} {unit}", hint=hint)
        self.what, self.size, self.limit, self.unit = what, size, limit, unit


class UnavailableError(MusterError):
    """A part that is needed does not answer (server, database, engine); it may come back."""

    retryable = True
