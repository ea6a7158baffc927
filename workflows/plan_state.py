"""The state of a plan's job: one serialisable object, so that a job can roll over to a new run."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from contracts.plan_job import NodeStatus, PlanJobInput
from workflows.reference import Step
from workflows.state import JobState

NodePath = tuple[Step, ...]
"""A node as it runs: its name, behind those of the maps it is in, each with an item's place."""

ENDED = frozenset((NodeStatus.DONE, NodeStatus.SKIPPED, NodeStatus.FAILED))


class NodeState(BaseModel):
    """How one node stands; `value` is what it gives, until nothing needs that any more.

    `size` is that of `value` as JSON, in bytes; `tries` counts attempts that have failed. A map has
    `items`, of which `next_item` is the first not begun; `open` are those it works on, `results`
    what the others gave.
    """

    model_config = ConfigDict(extra="forbid")

    status: NodeStatus = NodeStatus.WAITING
    value: JsonValue = None
    size: int = 0
    tries: int = 0
    error: str = ""
    began_at: datetime | None = None
    items: int | None = None
    next_item: int = 0
    results: dict[int, JsonValue] = Field(default_factory=dict)
    open: dict[int, BodyState] = Field(default_factory=dict)

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what says nothing: a job may have many nodes."""
        return {key: value for key, value in handler(self).items() if value not in _EMPTY}


_EMPTY: tuple[Any, ...] = (None, "", {})


class BodyState(BaseModel):
    """How the nodes of a body stand; one that is not there waits."""

    model_config = ConfigDict(extra="forbid")

    nodes: dict[str, NodeState] = Field(default_factory=dict)

    def node(self, name: str) -> NodeState:
        """Return a node's state, to be changed."""
        return self.nodes.setdefault(name, NodeState())


NodeState.model_rebuild()


class PlanState(JobState):
    """Everything a plan's job knows when none of its activities runs.

    `calls` are the tool calls, agents' tasks and approvals of the nodes that run.
    """

    root: BodyState = Field(default_factory=BodyState)


class PlanRunInput(PlanJobInput):
    """What one run of `PlanWorkflow` starts with: the job, and what the run before has left.

    `retried` is what a job that has failed has left: what is done in it is not done again.
    """

    carried: PlanState | None = None
    retried: BodyState | None = None


def shown(path: NodePath) -> str:
    """Return a node's path as people read it: `each[3].inner`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def reset_failed(body: BodyState) -> None:
    """Let all nodes run again that have failed for good, what is done being kept."""
    for node in body.nodes.values():
        for inner in node.open.values():
            reset_failed(inner)
        if node.status is NodeStatus.FAILED and node.items is not None and node.open:
            node.status, node.error = NodeStatus.RUNNING, ""
        elif node.status is NodeStatus.FAILED:
            node.status, node.error, node.tries = NodeStatus.WAITING, "", 0
            node.began_at, node.items, node.next_item = None, None, 0
            node.results, node.open = {}, {}
        elif node.status is NodeStatus.RUNNING:
            node.began_at = None
