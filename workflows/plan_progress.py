"""The progress of a plan, without a clock or a wait: what may run now, and what each end changes.

1. A node waits until all it needs have ended. Then it is skipped, if something it requires was, or
   if a branch chose another way; or it may run.
2. A branch and a join are over at once. A map opens items, as its width and the plan's allow: each
   is a body of its own, and what it gives is a result of the map.
3. All else is work: `take` gives the next that may begin, and `finish`, `fail` or `hand_back` says
   what became of it.
4. A node that failed for good lets its fallback run, is skipped, or fails its body: of a map's
   item that is the map, of the plan the plan.

A value is dropped once all that need it have ended. Ends of nodes that are not there any more, as
their map has failed, change nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from pydantic import JsonValue
from pydantic_core import to_json

from contracts.limit import MAX_MAP_ITEMS, MAX_PLAN_VALUES_BYTES
from contracts.plan import BranchNode, JoinNode, MapNode, Node, NodeFailure, Plan
from contracts.plan_job import NodeStatus
from workflows.plan_graph import INDEX, INPUT, ITEM, Body, graph_of
from workflows.plan_live import Live, Names, chosen, given, joined
from workflows.plan_state import ENDED, BodyState, NodePath, NodeState, shown
from workflows.reference import BadReferenceError, fill, kind_of
from workflows.text import MAX_ERROR_CHARS, one_line

MAX_KEPT_ERROR_CHARS = 300
"""Of a node's error, for people who look at the plan: a job that rolls over hands it on."""

_WAITING, _RUNNING, _DONE = NodeStatus.WAITING, NodeStatus.RUNNING, NodeStatus.DONE
_SKIPPED, _FAILED = NodeStatus.SKIPPED, NodeStatus.FAILED


class Progress:
    """What a plan's nodes have come to. `root` is changed in place, and is all that is to be kept.

    What ran when `root` was last worked on may run again.
    """

    def __init__(self, plan: Plan, root: BodyState, of_plan: Mapping[str, JsonValue]) -> None:
        self._plan = plan
        self._ready: dict[NodePath, None] = {}
        self._look: deque[tuple[Live, str]] = deque()
        self._maps: list[NodePath] = []
        self._live: dict[NodePath, Live] = {}
        self._dropped: list[NodePath] = []
        self.running: dict[NodePath, Node] = {}
        """What was taken and has not ended, in the order in which it was taken."""
        self.failure: tuple[NodePath, str] | None = None
        """The node that failed the plan, and why."""
        self.held_bytes = 0
        """Size of all values that are kept, as JSON."""
        self._root = self._resume((), graph_of(plan), root, None, {INPUT: dict(of_plan)})
        self._settle()

    @property
    def is_over(self) -> bool:
        """Say whether nothing will run any more."""
        return self.failure is not None or self._root.left == 0

    @property
    def has_ready(self) -> bool:
        """Say whether a node waits for nothing but room."""
        self._open_items()
        return bool(self._ready) and not self.is_over

    def take(self) -> NodePath | None:
        """Return the next node that may begin, which runs from now on; None if none may."""
        self._open_items()
        if self.is_over or len(self.running) >= self._plan.max_parallel or not self._ready:
            return None
        path = next(iter(self._ready))
        del self._ready[path]
        live, name = self._at(path)
        live.state.node(name).status = _RUNNING
        self.running[path] = live.body.nodes[name]
        return path

    def has(self, path: NodePath) -> bool:
        """Say whether something is still expected of a node."""
        return path[:-1] in self._live

    def node(self, path: NodePath) -> Node:
        """Return a node that is there."""
        live, name = self._at(path)
        return live.body.nodes[name]

    def state(self, path: NodePath) -> NodeState:
        """Return the state of a node that is there, to be changed."""
        live, name = self._at(path)
        return live.state.node(name)

    def filled(self, path: NodePath, value: JsonValue) -> JsonValue:
        """Return a value of a node with what it refers to; raises BadReferenceError."""
        return fill(value, Names(self._at(path)[0]))

    def finish(self, path: NodePath, value: JsonValue) -> None:
        """Take what a node gives."""
        if self._is_gone(path):
            return
        live, name = self._at(path)
        self._end(live, name, _DONE, value)
        self._settle()

    def fail(self, path: NodePath, error: str) -> None:
        """Note that a node has failed for good."""
        if self._is_gone(path):
            return
        live, name = self._at(path)
        self._fail(live, name, error)
        self._settle()

    def hand_back(self, path: NodePath) -> None:
        """Let a node wait again that was taken."""
        if self._is_gone(path):
            return
        self.state(path).status = _WAITING
        self._ready[path] = None

    def take_dropped(self) -> list[NodePath]:
        """Return nodes that ran when their map failed, each once: nothing is expected of them."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def output(self) -> JsonValue:
        """Return what the plan gives, once it is over; raises BadReferenceError."""
        assert self._root.left == 0, "a plan gives nothing before its end"
        if self._plan.output is not None:
            return fill(self._plan.output, Names(self._root))
        return {name: self._root.standing(name)[1] for name in self._root.body.sinks}

    def _is_gone(self, path: NodePath) -> bool:
        return self.running.pop(path, None) is None or not self.has(path)

    def _at(self, path: NodePath) -> tuple[Live, str]:
        name = path[-1]
        assert isinstance(name, str)
        return self._live[path[:-1]], name

    def _resume(
        self,
        path: NodePath,
        body: Body,
        state: BodyState,
        parent: Live | None,
        fixed: Mapping[str, JsonValue],
    ) -> Live:
        """Take up a body as it stands."""
        live = self._live[path] = Live(path, body, state, parent, fixed)
        live.left = len(body.nodes)
        for name in body.nodes:
            found = state.nodes.get(name)
            if found is None or found.status is _WAITING:
                self._look.append((live, name))
                continue
            self.held_bytes += found.size
            if found.status in ENDED:
                live.left -= 1
            elif isinstance(node := body.nodes[name], MapNode):
                self._resume_map(live, name, node, found)
            else:
                found.status = _WAITING
                self._look.append((live, name))
        return live

    def _resume_map(self, live: Live, name: str, node: MapNode, found: NodeState) -> None:
        items = fill(node.map, Names(live))
        assert isinstance(items, list)
        live.lists[name] = items
        self.held_bytes += sum(len(to_json(each)) for each in found.results.values())
        self._maps.append((*live.path, name))
        for place, inner in list(found.open.items()):
            fixed = {ITEM: items[place], INDEX: place}
            path, body = (*live.path, name, place), live.body.bodies[name]
            if self._resume(path, body, inner, live, fixed).left == 0:  # it could not give a value
                return self._end_item(self._live[path], live)
        return None

    def _settle(self) -> None:
        """Follow what has changed until nothing changes any more."""
        while self._look and self.failure is None:
            live, name = self._look.popleft()
            if self._live.get(live.path) is not live or live.status(name) is not _WAITING:
                continue
            if all(live.status(each) in ENDED for each in live.body.needs[name]):
                self._decide(live, name)

    def _decide(self, live: Live, name: str) -> None:
        """Skip a node that nothing is waited for any more, or begin it."""
        body, node = live.body, live.body.nodes[name]
        fallback_of, branch = body.fallback_of.get(name), body.branch_of.get(name)
        if fallback_of is not None and live.status(fallback_of) is not _FAILED:
            return self._end(live, name, _SKIPPED)
        if branch is not None and live.standing(branch) != (_DONE, name):
            return self._end(live, name, _SKIPPED)
        if any(live.standing(each)[0] is _SKIPPED for each in body.required[name]):
            return self._end(live, name, _SKIPPED)
        try:
            match node:
                case BranchNode():
                    value = fill(node.branch, Names(live))
                    self._end(live, name, _DONE, chosen(node, value))
                case JoinNode():
                    self._end(live, name, _DONE, joined(node, live))
                case MapNode():
                    self._begin_map(live, name, fill(node.map, Names(live)))
                case _:
                    self._ready[(*live.path, name)] = None
        except BadReferenceError as error:
            self._fail(live, name, error.message)

    def _end(self, live: Live, name: str, status: NodeStatus, value: JsonValue = None) -> None:
        """End a node that has not failed."""
        state = live.state.node(name)
        size = len(to_json(value)) if value is not None else 0
        if self.held_bytes + size > MAX_PLAN_VALUES_BYTES:
            return self._fail(
                live, name,
                f"with what it gives, the plan's values have {self.held_bytes + size:,} bytes, "
                f"the limit is {MAX_PLAN_VALUES_BYTES:,} bytes",
            )  # fmt: skip
        state.status, state.value, state.size = status, value, size
        self.held_bytes += size
        return self._follow(live, name)

    def _follow(self, live: Live, name: str) -> None:
        """Go on behind a node that has ended."""
        live.left -= 1
        body = live.body
        self._look.extend((live, each) for each in body.followers[name])
        for each in (*body.needs[name], name):
            if each not in body.kept and all(
                live.is_past(follower) for follower in body.followers[each]
            ):
                self._drop_value(live, each)
        if live.left == 0 and live.parent is not None:
            self._end_item(live, live.parent)

    def _drop_value(self, live: Live, name: str) -> None:
        state = live.state.nodes[name]
        self.held_bytes -= state.size
        state.value, state.size = None, 0

    def _fail(self, live: Live, name: str, error: str) -> None:
        """Do what a node's policy says about its failure."""
        node, state = live.body.nodes[name], live.state.node(name)
        state.error = one_line(error, MAX_KEPT_ERROR_CHARS)
        is_last = node.fallback is None and node.on_failure is NodeFailure.FAIL
        if isinstance(node, MapNode):
            self._close_map(live, name, keeps=is_last)
        if not is_last:
            state.status = _FAILED if node.fallback else _SKIPPED
            return self._follow(live, name)
        state.status = _FAILED
        if live.parent is None:
            self.failure = ((*live.path, name), one_line(error, MAX_ERROR_CHARS))
        else:
            *_, of_map, _ = live.path
            assert isinstance(of_map, str)
            whole = error if isinstance(node, MapNode) else f"{shown((*live.path, name))}: {error}"
            self._fail(live.parent, of_map, whole)
        return None

    def _begin_map(self, live: Live, name: str, items: JsonValue) -> None:
        if not isinstance(items, list):
            return self._fail(live, name, f"`map` takes a list, this is {kind_of(items)}")
        if len(items) > MAX_MAP_ITEMS:
            return self._fail(
                live, name, f"`map` has {len(items):,} items, the limit is {MAX_MAP_ITEMS:,} items"
            )
        state = live.state.node(name)
        state.items = len(items)
        if not items:
            return self._end(live, name, _DONE, [])
        state.status, live.lists[name] = _RUNNING, items
        self._maps.append((*live.path, name))
        return None

    def _open_items(self) -> None:
        """Open items of maps, those of inner maps first, while there is room to run them."""
        while self._maps and self.failure is None:
            if len(self._ready) + len(self.running) >= self._plan.max_parallel:
                return
            path = self._maps[-1]
            if path[:-1] not in self._live or not self._open_item(path):
                self._maps.remove(path)
            self._settle()

    def _open_item(self, path: NodePath) -> bool:
        """Open the next item of a map; False if there is none, or no room in its width."""
        live, name = self._at(path)
        node, state = live.body.nodes[name], live.state.node(name)
        assert isinstance(node, MapNode)
        if state.status is not _RUNNING or state.next_item >= len(live.lists[name]):
            return False
        if len(state.open) >= node.width:
            return False
        place = state.next_item
        state.next_item += 1
        state.open[place] = BodyState()
        fixed = {ITEM: live.lists[name][place], INDEX: place}
        self._resume((*path, place), live.body.bodies[name], state.open[place], live, fixed)
        return True

    def _end_item(self, live: Live, parent: Live) -> None:
        """Take what an item gives as a result of its map."""
        *_, name, place = live.path
        assert isinstance(name, str)
        assert isinstance(place, int)
        try:
            value = given(live)
        except BadReferenceError as error:
            return self._fail(parent, name, f"{shown(live.path)}: {error.message}")
        self._forget(live)
        state = parent.state.nodes[name]
        del state.open[place]
        state.results[place] = value
        self.held_bytes += len(to_json(value))
        if self.held_bytes > MAX_PLAN_VALUES_BYTES:
            return self._fail(
                parent, name,
                f"with its results, the plan's values have {self.held_bytes:,} bytes, the limit is "
                f"{MAX_PLAN_VALUES_BYTES:,} bytes",
            )  # fmt: skip
        if len(state.results) == state.items:
            results = [state.results[each] for each in range(state.items)]
            self._drop_results(state)
            del parent.lists[name]
            return self._end(parent, name, _DONE, results)
        if (path := (*parent.path, name)) not in self._maps:
            self._maps.append(path)
        return None

    def _drop_results(self, state: NodeState) -> None:
        self.held_bytes -= sum(len(to_json(each)) for each in state.results.values())
        state.results = {}

    def _close_map(self, live: Live, name: str, *, keeps: bool) -> None:
        """Stop a map; what it has done is kept where the plan may be tried again."""
        state, path = live.state.node(name), (*live.path, name)
        self._dropped += [each for each in self.running if each[: len(path)] == path]
        self._ready = {each: None for each in self._ready if each[: len(path)] != path}
        for place in list(state.open):
            if (inner := self._live.get((*path, place))) is not None:
                self._forget(inner)
        if not keeps:
            self._drop_results(state)
            state.open = {}

    def _forget(self, live: Live) -> None:
        """Let go of a body, with those inside of it, and of its values."""
        for path in [each for each in self._live if each[: len(live.path)] == live.path]:
            inner = self._live.pop(path)
            for state in inner.state.nodes.values():
                self.held_bytes -= state.size
                self._drop_sizes(state)

    def _drop_sizes(self, state: NodeState) -> None:
        self.held_bytes -= sum(len(to_json(each)) for each in state.results.values())
