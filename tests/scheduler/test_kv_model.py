"""The model of the cache against a block pool that evicts as the engine does, and its counts."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from inference_service.engine.block_pool import BlockPool
from inference_service.scheduler.event import Node
from inference_service.scheduler.kv_model import Chain, KVModel

BLOCK = 4
POOL_BLOCKS = 24
OPENINGS = {"": 0, "x": 3, "y": 5}
"""Blocks of what contexts share."""


@dataclass(eq=False)
class Context:
    """A context that both worlds have; `taken` are the engine's blocks while it runs."""

    name: str
    path: list[Node]
    chain: Chain
    keys: list[int]
    taken: list[int] = field(default_factory=list)
    is_held: bool = False


class KVMachine(RuleBasedStateMachine):
    """Runs contexts in the model and in a block pool, one engine request at a time and more."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVModel(POOL_BLOCKS, BLOCK)
        self.pool = BlockPool(POOL_BLOCKS)
        self.contexts: list[Context] = []
        self.number = 0

    @precondition(lambda self: len(self.contexts) < 8)
    @rule(opening=st.sampled_from(sorted(OPENINGS)), own=st.integers(1, 30))
    def context_comes(self, opening: str, own: int) -> None:
        self.number += 1
        shared = OPENINGS[opening] * BLOCK
        base = [Node(opening, shared)] if opening else []
        path = [*base, Node(f"step/{self.number}", shared + own)]
        keys = [1_000 * shared + block for block in range(shared // BLOCK)]
        keys += [-(self.number * 1_000 + n) for n in range(path[-1].end // BLOCK - len(keys))]
        chain = self.kv.extended([], path)
        self.contexts.append(Context(f"c{self.number}", path, chain, keys))

    @precondition(lambda self: any(not c.taken for c in self.contexts))
    @rule(data=st.data())
    def context_runs(self, data: st.DataObject) -> None:
        context = data.draw(st.sampled_from([c for c in self.contexts if not c.taken]))
        found = self.pool.find(context.keys)
        assert self.kv.cached_tokens(context.chain) == len(found) * BLOCK
        new = self.pool.take(found, len(context.keys) - len(found) + 1)
        if new is None:
            return
        for block, key in zip(new, context.keys[len(found) :], strict=False):
            self.pool.name(block, key)
        context.taken = [*found, *new]
        self.kv.enter(context.chain, 1)

    @precondition(lambda self: any(c.taken for c in self.contexts))
    @rule(data=st.data())
    def context_leaves(self, data: st.DataObject) -> None:
        context = data.draw(st.sampled_from([c for c in self.contexts if c.taken]))
        self.pool.release(context.taken)
        context.taken = []
        self.kv.leave(context.chain)

    @precondition(lambda self: self.contexts)
    @rule(data=st.data())
    def context_is_held_or_let_go(self, data: st.DataObject) -> None:
        context = data.draw(st.sampled_from(self.contexts))
        if context.is_held:
            self.kv.release(context.name, context.chain)
        else:
            self.kv.hold(context.name, context.chain)
        context.is_held = not context.is_held

    @precondition(lambda self: any(not c.taken for c in self.contexts))
    @rule(data=st.data())
    def context_is_forgotten(self, data: st.DataObject) -> None:
        context = data.draw(st.sampled_from([c for c in self.contexts if not c.taken]))
        self.kv.release(context.name, context.chain)
        self.kv.forget(context.chain)
        self.contexts.remove(context)

    @invariant()
    def counts_are_those_of_the_contexts(self) -> None:
        self.kv.check_integrity()
        self.pool.check_integrity()
        kept = {key for c in self.contexts if c.is_held or c.taken for key in c.keys}
        running = {key for c in self.contexts if c.taken for key in c.keys}
        assert self.kv.kept == len(kept), "each shared block counts once"
        assert self.kv.running == len(running)


class OneAtATime(KVMachine):
    """As the above, with one context in the engine: then the model knows all that it does."""

    @precondition(lambda self: not any(c.taken for c in self.contexts))
    @rule(data=st.data())
    def context_runs(self, data: st.DataObject) -> None:
        if self.contexts:
            super().context_runs(data)

    @invariant()
    def cached_is_what_the_pool_finds(self) -> None:
        for context in self.contexts:
            if not context.taken:
                cached = len(self.pool.find(context.keys)) * BLOCK
                assert self.kv.cached_tokens(context.chain) == cached


class ManyAtOnce(KVMachine):
    """As the first, but the engine tells what it has cached before a context runs."""

    @precondition(lambda self: any(not c.taken for c in self.contexts))
    @rule(data=st.data())
    def context_runs(self, data: st.DataObject) -> None:
        for context in self.contexts:
            if not context.taken:
                cached = len(self.pool.find(context.keys)) * BLOCK
                self.kv.correct(context.chain, cached)
                if self.kv.cached_tokens(context.chain) != cached:
                    return  # a part of it belongs to one that runs
        super().context_runs(data)


@pytest.mark.parametrize("machine", [OneAtATime, ManyAtOnce])
def test_model_of_the_cache_is_what_the_engine_does(machine: type[KVMachine]) -> None:
    run_machine(machine, settings=settings(max_examples=150, deadline=None))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_nodes_of_a_context_have_the_blocks_of_the_whole(sizes: list[int]) -> None:
    kv = KVModel(100, BLOCK)
    path = [Node(str(n), sum(sizes[: n + 1])) for n in range(len(sizes))]
    chain = kv.extended([], path)
    assert sum(node.size for node in chain) == sum(sizes) // BLOCK == kv.blocks(chain)


def test_blocks_of_leases_that_share_are_released_with_the_last() -> None:
    kv = KVModel(100, BLOCK)
    chains = {}
    for name in "ab":
        chains[name] = kv.extended([], [Node("opening", 40), Node(name, 48)])
        kv.hold(name, chains[name])
    assert kv.released_blocks(chains["a"], "a", set()) == 2
    assert kv.released_blocks(chains["b"], "b", {"a"}) == 12
    shares = kv.extended([], [Node("opening", 40), Node("c", 90)])
    assert kv.released_blocks(chains["b"], "b", {"a"}, shares) == 2
    kv.enter(shares, 1)
    assert kv.released_blocks(chains["b"], "b", {"a"}) == 2, "what runs is not released"


def test_growing_moves_nothing_that_runs() -> None:
    kv = KVModel(10, BLOCK)
    chain = kv.extended([], [Node("a", 10)])
    kv.enter(chain, 3)
    kv.grow(chain[-1], 19)
    assert (kv.running, kv.kept, kv.cached_tokens(chain)) == (4, 4, 16)
    kv.check_integrity()
    kv.leave(chain)
    assert (kv.running, kv.kept, kv.cached_tokens(chain)) == (0, 0, 16)
    kv.check_integrity()


def test_what_runs_is_not_evicted() -> None:
    kv = KVModel(6, BLOCK)
    chain = kv.extended([], [Node("a", 12)])
    for _ in range(2):  # the second time it comes from the free queue
        kv.enter(chain, 0)
        kv.enter(other := kv.extended([], [Node("b", 12)]), 3)
        assert kv.cached_tokens(chain) == 12
        kv.check_integrity()
        kv.leave(other)
        kv.leave(chain)


def test_touched_context_is_evicted_last() -> None:
    kv = KVModel(6, BLOCK)
    chains = [kv.extended([], [Node(name, 12)]) for name in "ab"]
    for chain in chains:
        kv.enter(chain, 0)
        kv.leave(chain)
    kv.touch(chains[0])
    kv.enter(kv.extended([], [Node("c", 8)]), 0)
    assert [kv.cached_tokens(chain) for chain in chains] == [12, 4]


def test_held_context_at_the_head_of_the_queue_is_at_risk() -> None:
    kv = KVModel(10, BLOCK)
    chain = kv.extended([], [Node("a", 20)])
    kv.hold("a", chain)
    kv.enter(chain, 0)
    kv.leave(chain)
    assert list(kv.at_risk(5, [])) == []
    assert list(kv.at_risk(6, [])) == ["a"]
    assert list(kv.at_risk(6, chain)) == [], "its own blocks leave the queue first"
    assert kv.unheld_free([]) == kv.unheld_free(chain) == 5
    kv.release("a", chain)
    assert (kv.unheld_free([]), kv.unheld_free(chain)) == (10, 5), "what is its own is used"


def test_nothing_is_cached_after_the_engine_is_lost() -> None:
    kv = KVModel(10, BLOCK)
    chain = kv.extended([], [Node("a", 20)])
    kv.enter(chain, 0)
    kv.leave(chain)
    kv.clear()
    assert kv.cached_tokens(chain) == 0
    kv.forget(chain)
    assert len(kv) == 0
