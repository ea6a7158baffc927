"""One job of a plan: what it starts with, and how its nodes stand."""

from __future__ import annotations

from enum import StrEnum

from pydantic import AwareDatetime, ConfigDict, Field, JsonValue

from contracts.message import Frozen
from contracts.plan import Plan


class PlanJobInput(Frozen):
    """Start input of `PlanWorkflow`. The workflow id is the job id; it returns a job's result.

    Its `answer` is what the plan gives: text as it is, all else as JSON.
    """

    plan: Plan
    input: dict[str, JsonValue]
    model: str
    """Served model of the LLM nodes that name none, resolved by the client."""
    tenant: str = "default"
    priority: int = Field(3, ge=1, le=5)
    deadline: AwareDatetime | None = None

    @property
    def name(self) -> str:
        """The plan's name."""
        return self.plan.name


class PlanJobStart(PlanJobInput):
    """What a plan's job was started with, as its history has it: what it took over is left out."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class NodeStatus(StrEnum):
    """How one node stands."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    SKIPPED = "skipped"
    FAILED = "failed"


class NodeProgress(Frozen):
    """How one node stands, for people; of a map, how many of its items are done."""

    name: str
    kind: str
    status: NodeStatus
    tries: int = 0
    """Attempts that have failed."""
    error: str = ""
    items: int | None = None
    items_done: int = 0


class PlanProgress(Frozen):
    """Answer of the `plan` query: the nodes of the plan, those inside of maps aside."""

    nodes: tuple[NodeProgress, ...]
    running: tuple[str, ...]
    """Nodes that run now, those inside of maps too; no more than a few."""
