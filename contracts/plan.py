"""A plan as a person or a model writes it: nodes that take in what earlier nodes gave.

A value that names an earlier one is written `${node}`, `${node.field}`, `${node.list[0]}`; the
plan's own input is `${input}`, and inside a `map` one item is `${item}` and its place `${index}`. A
text that is nothing but one reference stands for the value itself; among other words it is text.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any

from pydantic import (
    Discriminator,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    StringConstraints,
    Tag,
    model_serializer,
    model_validator,
)

from contracts.agent import Name, SubAgent, ToolRef
from contracts.approval import Approval, PersonName
from contracts.limit import (
    MAX_APPROVERS,
    MAX_MAP_WIDTH,
    MAX_NAMED_APPROVERS,
    MAX_PLAN_NODES,
    MAX_TOOLS,
)
from contracts.message import Frozen
from contracts.tool_source import Duration

NODE_KINDS = ("llm", "tool", "approval", "agent", "branch", "map", "join")
"""What a node does; the key of that name says with what."""


class NodeFailure(StrEnum):
    """What a node that has failed, its retries included, does to the plan."""

    FAIL = "fail"
    """The plan fails; in a map, the map does."""
    SKIP = "skip"
    """It counts as skipped, and what needs it is skipped too, joins aside."""


class NodeBase(Frozen):
    """What all nodes have; a node waits for those that it refers to, and for those in `after`."""

    after: tuple[Name, ...] = Field((), max_length=MAX_PLAN_NODES)
    on_failure: NodeFailure = NodeFailure.FAIL
    fallback: Name | None = None
    """The node that runs if this one fails, and whose value stands for its own then."""

    @model_validator(mode="after")
    def _has_one_way_to_fail(self) -> NodeBase:
        if self.fallback and self.on_failure is not NodeFailure.FAIL:
            raise ValueError(f"`fallback` and `on_failure: {self.on_failure}` exclude each other")
        return self


class WorkNode(NodeBase):
    """What nodes have that do work outside of the plan."""

    timeout: Duration | None = None
    """From its start to its end, retries included; without it, the plan's time is the limit."""
    retries: int = Field(0, ge=0, le=10)


class LLMNode(WorkNode):
    """One LLM step: `llm` is the prompt. It gives text, one of `choices`, or JSON like `output`."""

    llm: str = Field(min_length=1)
    instructions: str = ""
    choices: tuple[Annotated[str, StringConstraints(min_length=1, max_length=200)], ...] = ()
    output: dict[str, JsonValue] | None = None
    """JSON schema."""
    model: Name | None = None
    max_tokens: int = Field(256, ge=1, le=32_768)

    @model_validator(mode="after")
    def _has_one_form(self) -> LLMNode:
        if self.choices and self.output is not None:
            raise ValueError("`choices` and `output` exclude each other")
        if len(set(self.choices)) != len(self.choices):
            raise ValueError("`choices` names something twice")
        return self


class ToolNode(WorkNode):
    """One call of a tool of the plan; it gives what the tool returns: text, or JSON if `output`."""

    tool: Name
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    output: dict[str, JsonValue] | None = None
    """JSON schema of what it returns, which is read as JSON then."""


class ApprovalNode(NodeBase):
    """A question to people; it gives `approved`, `by` and `reason`. A denial is no failure."""

    approval: str = Field(min_length=1, max_length=4_000)
    people: int = Field(1, ge=1, le=MAX_APPROVERS)
    """How many different people must approve."""
    by: tuple[PersonName, ...] = Field((), max_length=MAX_NAMED_APPROVERS)
    """Who may decide; anybody if empty."""
    expires: Duration | None = None
    """Undecided so long, it counts as denied."""

    @model_validator(mode="after")
    def _can_be_decided(self) -> ApprovalNode:
        if self.policy.people > 0 and (self.fallback or self.on_failure is not NodeFailure.FAIL):
            raise ValueError("a denial is no failure: branch on `approved` instead of `on_failure`")
        return self

    @property
    def policy(self) -> Approval:
        """Who decides, as a tool's approval says it."""
        return Approval(people=self.people, by=self.by, expires=self.expires)


class AgentNode(WorkNode):
    """A task for an agent of the plan, as a job of its own; it gives the agent's answer."""

    agent: Name
    task: str = Field(min_length=1)


class Case(Frozen):
    """One way out of a branch, taken if all of what it says holds."""

    then: Name
    equals: JsonValue = None
    one_of: tuple[JsonValue, ...] = ()
    above: float | None = None
    below: float | None = None

    @property
    def tests(self) -> frozenset[str]:
        """The fields that were given, `then` aside."""
        return frozenset(self.model_fields_set - {"then"})

    @model_serializer(mode="wrap")
    def _as_given(self, handler: SerializerFunctionWrapHandler) -> dict[str, JsonValue]:
        """Write down what was given alone: a test for null is a test."""
        return {key: value for key, value in handler(self).items() if key in self.model_fields_set}

    @model_validator(mode="after")
    def _tests_something(self) -> Case:
        if not self.tests:
            raise ValueError("a case says when it holds: `equals`, `one_of`, `above` or `below`")
        return self


class BranchNode(NodeBase):
    """A choice by an earlier value: the first case that holds is run, all others are skipped.

    It gives the name of the node it chose, null if none.
    """

    branch: JsonValue
    cases: tuple[Case, ...] = Field(min_length=1, max_length=64)
    otherwise: Name | None = None


class MapNode(NodeBase):
    """The nodes of `do`, once for each item of a list, at most `width` items at a time.

    It gives the list of what `gives` stands for, in the order of the items.
    """

    map: JsonValue
    do: dict[Name, Node] = Field(min_length=1, max_length=MAX_PLAN_NODES)
    gives: JsonValue = None
    """A value of the nodes in `do`; by default that of the one which no other needs. Of an item
    whose node was skipped it is null."""
    width: int = Field(8, ge=1, le=MAX_MAP_WIDTH)


class JoinNode(NodeBase):
    """Waits for nodes that may have been skipped.

    It gives an object with the value of each, null for a skipped one; with `first`, the value of
    the first of them that was not skipped.
    """

    join: tuple[Name, ...] = Field(min_length=1, max_length=MAX_PLAN_NODES)
    first: bool = False

    @model_validator(mode="after")
    def _cannot_fail(self) -> JoinNode:
        if self.fallback or self.on_failure is not NodeFailure.FAIL:
            raise ValueError("a join does not fail: it has no `fallback` and no `on_failure`")
        return self


def node_kind(node: Any) -> str | None:
    """Return what kind of node `node` is, data or model; None if it is of none, or of several."""
    keys = node if isinstance(node, Mapping) else type(node).model_fields
    kinds = [kind for kind in NODE_KINDS if kind in keys]
    return kinds[0] if len(kinds) == 1 else None


def _tag_of(node: Any) -> str | None:
    kind = node_kind(node)
    return f"<{kind}>" if kind else None


Node = Annotated[
    Annotated[LLMNode, Tag("<llm>")]
    | Annotated[ToolNode, Tag("<tool>")]
    | Annotated[ApprovalNode, Tag("<approval>")]
    | Annotated[AgentNode, Tag("<agent>")]
    | Annotated[BranchNode, Tag("<branch>")]
    | Annotated[MapNode, Tag("<map>")]
    | Annotated[JoinNode, Tag("<join>")],
    Discriminator(
        _tag_of,
        custom_error_type="node_kind",
        custom_error_message=f"a node has exactly one of {', '.join(NODE_KINDS)}",
    ),
]

MapNode.model_rebuild()


def _any_object() -> dict[str, JsonValue]:
    return {"type": "object"}


class PlanLimits(Frozen):
    """What one job of a plan may use, its agents included; the plan fails at the next node."""

    max_tokens: int = Field(1_000_000, ge=1)
    """Prompt tokens not served from cache, plus generated tokens."""
    max_tool_calls: int = Field(10_000, ge=0, le=10_000)
    max_llm_steps: int | None = Field(None, ge=1)
    max_engine_time: Duration | None = None
    """Time of its steps in the engine."""
    max_wall_time: Duration = timedelta(hours=24)


class Plan(Frozen):
    """A DAG of nodes, what it takes in and what it gives."""

    name: Name
    description: str = Field("", max_length=4_000)
    input: dict[str, JsonValue] = Field(default_factory=_any_object)
    """JSON schema of the input object."""
    model: Name | None = None
    """Served model of the LLM nodes that name none; the stack's default model if not given."""
    tools: tuple[ToolRef, ...] = Field((), max_length=MAX_TOOLS)
    agents: tuple[SubAgent, ...] = Field((), max_length=MAX_TOOLS)
    nodes: dict[Name, Node] = Field(min_length=1, max_length=MAX_PLAN_NODES)
    output: JsonValue = None
    """What the plan gives; by default an object with the value of each node that no other needs."""
    max_parallel: int = Field(64, ge=1, le=MAX_MAP_WIDTH)
    """Nodes that run at a time, those of maps included."""
    limits: PlanLimits = PlanLimits()
