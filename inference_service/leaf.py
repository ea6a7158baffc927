"""Which session a step continues, and its path: the leaves of the jobs' context trees.

Theory of operation. A session is one growing leaf of one job's context tree. A job that goes
straight on has one session, however many steps it takes: each step continues the token run in
which the session ends. A step whose base is no leaf (a fork, or a fan-out whose sibling has taken
the leaf) begins a session of its own, named, as every session, by the step that began it.

A path is a list of nodes, root first: one for the opening that all jobs of an agent share, then
one for each step, which ends where its prompt ends until the step has finished, and with its
answer from then on. A base not known here (after a restart) is one node, whatever it is made of.

A leaf grows when its step has been committed, not before: what another owner of the step committed
in its place is not what was generated here.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field

from contracts.llm_step import LLMStepInput
from inference_service.scheduler.event import Node
from inference_service.session import Prompt

MAX_LEAVES = 20_000
"""Sessions known at once; beyond this the one that was used least recently is given up."""

MAX_LEAF_TOKENS = 32_000_000
"""Token ids kept with leaves, 4 bytes each; beyond this the oldest cannot be touched any more."""


@dataclass(eq=False, slots=True)
class Leaf:
    """One session: where its context ends (`run`, None before its first step is committed).

    `step` is the step in the service that continues it, and `growing` that step's path. `token_ids`
    is the whole context, None where it is not kept; `keys` are the cache mirror's for its first
    blocks. `is_sampled` says that the engine has ended the step, `is_over` that the job ended while
    the step was still here.
    """

    session: str
    job: str
    run: str | None = None
    path: tuple[Node, ...] = ()
    token_ids: array[int] | None = None
    keys: array[int] = field(default_factory=lambda: array("q"))
    step: str | None = None
    growing: tuple[Node, ...] = ()
    is_sampled: bool = False
    is_over: bool = False


class Leaves:
    """All sessions that this service knows."""

    def __init__(self, *, max_leaves: int = MAX_LEAVES, max_tokens: int = MAX_LEAF_TOKENS) -> None:
        self._max_leaves = max_leaves
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._leaves: OrderedDict[str, Leaf] = OrderedDict()
        self._of_run: dict[str, Leaf] = {}
        self._of_job: dict[str, dict[str, Leaf]] = {}

    def __len__(self) -> int:
        return len(self._leaves)

    def get(self, session: str) -> Leaf | None:
        """Return a session, or None if it is not known."""
        return self._leaves.get(session)

    def of_job(self, job: str) -> list[Leaf]:
        """Return the sessions of a job."""
        return list(self._of_job.get(job, {}).values())

    def take(self, step: LLMStepInput, prompt: Prompt) -> Leaf:
        """Return the session that the step continues, begun now if it continues none."""
        own, base = self._leaves.get(step.step_id), self._base(step)
        leaf = own or (base if base and base.step is None else self._begin(step))
        leaf.step = step.step_id
        leaf.growing = (
            *self._base_path(step, prompt, base),
            Node(step.step_id, len(prompt.token_ids)),
        )
        self._leaves.move_to_end(leaf.session)
        return leaf

    def find(self, step: LLMStepInput) -> Leaf | None:
        """Return the session that a step began or would continue, if it is known."""
        return self._leaves.get(step.step_id) or self._base(step)

    def sampled(self, leaf: Leaf, token_ids: array[int]) -> Node:
        """Note that the step has its answer, `token_ids` with it; return the node it is now."""
        assert leaf.step is not None
        node = Node(leaf.step, len(token_ids))
        leaf.growing = (*leaf.growing[:-1], node)
        leaf.is_sampled = True
        self._keep(leaf, token_ids)
        return node

    def grow(self, leaf: Leaf) -> None:
        """Let the session end where its step has, which is committed."""
        assert leaf.step is not None
        if leaf.run is not None:
            self._of_run.pop(leaf.run, None)
        leaf.run, leaf.path = leaf.step, leaf.growing
        self._of_run[leaf.run] = leaf
        self.release(leaf)

    def release(self, leaf: Leaf) -> None:
        """Let the session end where it did before: its step came to nothing."""
        leaf.step, leaf.growing, leaf.is_sampled = None, (), False

    def drop(self, leaf: Leaf) -> None:
        """Forget a session."""
        assert leaf.step is None
        self._keep(leaf, None)
        del self._leaves[leaf.session]
        siblings = self._of_job[leaf.job]
        del siblings[leaf.session]
        if not siblings:
            del self._of_job[leaf.job]
        if leaf.run is not None and self._of_run.get(leaf.run) is leaf:
            del self._of_run[leaf.run]

    def excess(self) -> list[Leaf]:
        """Return the sessions to give up, so that no more than `max_leaves` are known."""
        num = len(self._leaves) - self._max_leaves
        if num <= 0:
            return []
        return [leaf for leaf in self._leaves.values() if leaf.step is None][:num]

    def _keep(self, leaf: Leaf, token_ids: array[int] | None) -> None:
        self._num_tokens += len(token_ids or ()) - len(leaf.token_ids or ())
        leaf.token_ids = token_ids
        for oldest in self._leaves.values():
            if self._num_tokens <= self._max_tokens or oldest is leaf:
                break
            self._num_tokens -= len(oldest.token_ids or ())
            oldest.token_ids = None

    def _base(self, step: LLMStepInput) -> Leaf | None:
        """Return the session that ends where the step goes on."""
        return self._of_run.get(step.base.token_run or "") if step.base else None

    def _begin(self, step: LLMStepInput) -> Leaf:
        leaf = Leaf(session=step.step_id, job=step.job_id)
        self._leaves[leaf.session] = leaf
        self._of_job.setdefault(leaf.job, {})[leaf.session] = leaf
        return leaf

    def _base_path(
        self, step: LLMStepInput, prompt: Prompt, known: Leaf | None
    ) -> tuple[Node, ...]:
        """Return the nodes of the step's base, as far as the prompt begins with them."""
        run = step.base.token_run if step.base else None
        if run is None:
            return (prompt.opening,) if prompt.opening else ()
        path = known.path if known else self._forked_path(step.job_id, run)
        if not path:
            # Not the id of the step's own node: that one may stand further down in a path.
            path = (Node(f"={run}.{prompt.kept}", prompt.kept),)
        return tuple(node for node in path if 0 < node.end <= prompt.kept)

    def _forked_path(self, job: str, run: str) -> tuple[Node, ...]:
        """Return the path of a context that a session of the job has grown beyond, or nothing."""
        for leaf in self._of_job.get(job, {}).values():
            for place, node in enumerate(leaf.path):
                if node.id == run:
                    return leaf.path[: place + 1]
        return ()
