"""A body of a plan while it is worked on: what its names stand for, and what follows from that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue

from contracts.plan import BranchNode, Case, JoinNode
from contracts.plan_job import NodeStatus
from workflows.plan_graph import Body, names_in
from workflows.plan_state import BodyState, NodePath
from workflows.reference import fill

_DONE, _FAILED = NodeStatus.DONE, NodeStatus.FAILED


@dataclass(eq=False)
class Live:
    """A body that is worked on: the plan's own, or that of an item of a map."""

    path: NodePath
    body: Body
    state: BodyState
    parent: Live | None
    fixed: Mapping[str, JsonValue]
    """What names stand for that are no nodes: `input`; `item` and `index`."""
    left: int = 0
    lists: dict[str, list[JsonValue]] = field(default_factory=dict)
    """The items of its maps that run."""

    def status(self, name: str) -> NodeStatus:
        """Return how a node itself stands."""
        found = self.state.nodes.get(name)
        return found.status if found else NodeStatus.WAITING

    def is_past(self, name: str) -> bool:
        """Say whether a node has ended for good, also should the plan be tried again."""
        status = self.status(name)
        is_replaced = status is _FAILED and self.body.nodes[name].fallback is not None
        return is_replaced or status in (_DONE, NodeStatus.SKIPPED)

    def standing(self, name: str) -> tuple[NodeStatus, JsonValue]:
        """Return how a node stands and what it gives, by its fallback if it has failed."""
        for each in self.body.chain(name):
            if self.status(each) is not _FAILED:
                found = self.state.nodes.get(each)
                return (found.status, found.value) if found else (NodeStatus.WAITING, None)
        return _FAILED, None


class Names(Mapping[str, JsonValue]):
    """What names stand for in a body: its nodes, and those around it."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def __getitem__(self, name: str) -> JsonValue:
        live: Live | None = self._live
        while live is not None:
            if name in live.fixed:
                return live.fixed[name]
            if name in live.body.nodes:
                return live.standing(name)[1]
            live = live.parent
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        live: Live | None = self._live
        while live is not None:
            yield from live.fixed
            yield from live.body.nodes
            live = live.parent

    def __len__(self) -> int:
        return sum(1 for _ in self)


def given(live: Live) -> JsonValue:
    """Return what an item of a map gives, null if something that it refers to was skipped."""
    gives = live.body.gives
    if gives is None:
        [name] = live.body.sinks
        return live.standing(name)[1]
    for name in names_in(gives):
        if name in live.body.nodes and live.standing(name)[0] is NodeStatus.SKIPPED:
            return None
    return fill(gives, Names(live))


def joined(node: JoinNode, live: Live) -> JsonValue:
    found = {name: live.standing(name) for name in node.join}
    if not node.first:
        return {name: value for name, (_, value) in found.items()}
    return next((value for status, value in found.values() if status is _DONE), None)


def chosen(node: BranchNode, value: JsonValue) -> str | None:
    return next((case.then for case in node.cases if holds(case, value)), node.otherwise)


def holds(case: Case, value: JsonValue) -> bool:
    """Say whether a value passes all tests of a case."""
    tests = case.tests
    if "equals" in tests and not _equal(value, case.equals):
        return False
    if "one_of" in tests and not any(_equal(value, each) for each in case.one_of):
        return False
    if case.above is None and case.below is None:
        return True
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return (case.above is None or value > case.above) and (case.below is None or value < case.below)


def _equal(one: JsonValue, other: JsonValue) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)
