"""Approvals: when a call waits for people, what they decide, and what waits now.

And pause: a person's request that a job schedule nothing new.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Discriminator, Field, JsonValue, StringConstraints, Tag, model_validator

from contracts.limit import (
    MAX_APPROVERS,
    MAX_DECISION_ID_CHARS,
    MAX_NAMED_APPROVERS,
    MAX_REASON_CHARS,
)
from contracts.message import Frozen, ToolCall
from contracts.tool_source import Duration

PersonName = Annotated[
    str, StringConstraints(pattern=r"^[^\s\x00-\x1f\x7f,|'\"`]{1,64}$", max_length=64)
]
"""Who decides, as they are called everywhere: no spaces, quotes, commas or bars."""


class ApprovalMode(StrEnum):
    """Whether calls need approval, where no more than that is to be said."""

    NEVER = "never"
    ALWAYS = "always"


class Approval(Frozen):
    """Calls need people's approval: all of them, or those whose arguments match `when`.

    One denial by somebody who may decide is final.
    """

    when: dict[str, JsonValue] | None = None
    """JSON schema of the arguments object; None: each call needs approval."""
    people: int = Field(1, ge=1, le=MAX_APPROVERS)
    """How many different people must approve."""
    by: tuple[PersonName, ...] = Field((), max_length=MAX_NAMED_APPROVERS)
    """Who may decide; anybody if empty."""
    expires: Duration | None = None
    """A call that was not decided for so long counts as denied."""

    @model_validator(mode="after")
    def _enough_may_decide(self) -> Approval:
        if len(set(self.by)) != len(self.by):
            raise ValueError("`by` names somebody twice")
        if self.by and len(self.by) < self.people:
            raise ValueError(
                f"{self.people} people must approve, and `by` names {len(self.by)} who may"
            )
        return self


def _kind_of(value: object) -> str:
    return "<rule>" if isinstance(value, dict | Approval) else "<mode>"


ApprovalPolicy = Annotated[
    Annotated[ApprovalMode, Tag("<mode>")] | Annotated[Approval, Tag("<rule>")],
    Discriminator(_kind_of),
]
"""As an agent file gives it: `never`, `always`, or what exactly. What is wrong with the one is said
without a word on the other."""


class Verdict(StrEnum):
    """What a person decides on a call."""

    APPROVE = "approve"
    DENY = "deny"


class Decision(Frozen):
    """One person's decision on one call; the `decide` update's input.

    The client chooses `id`: a decision that is sent again under its id counts once. The model reads
    the `reason` of a denial.
    """

    id: str = Field(min_length=1, max_length=MAX_DECISION_ID_CHARS)
    call_id: str = Field(min_length=1, max_length=300)
    verdict: Verdict
    by: PersonName
    reason: str = Field("", max_length=MAX_REASON_CHARS)


class PauseRequest(Frozen):
    """Input of the updates `pause` and `resume`: who asks, and why."""

    id: str = Field(min_length=1, max_length=MAX_DECISION_ID_CHARS)
    by: PersonName
    reason: str = Field("", max_length=MAX_REASON_CHARS)


class CheckApprovalInput(Frozen):
    """Input of the `check_approval` activity: does the call match the rule?"""

    job_id: str
    call: ToolCall
    when: dict[str, JsonValue]


class CheckApprovalResult(Frozen):
    """Result of the `check_approval` activity."""

    is_needed: bool


class PendingApproval(Frozen):
    """A call that waits for people."""

    call_id: str
    tool: str
    arguments: str
    """On one line, shortened."""
    asked_at: datetime
    expires_at: datetime | None
    people: int
    by: tuple[str, ...]
    approved_by: tuple[str, ...]
    note: str
    """Why approval is needed, where the policy alone does not say so."""


class Pause(Frozen):
    """Since when a job is paused, by whom, and why."""

    at: datetime
    by: str
    reason: str


class JobWaits(Frozen):
    """Answer of the `waits` query: what a job waits for that only people can give."""

    pending: tuple[PendingApproval, ...] = ()
    paused: Pause | None = None
