"""What the scheduler believes the engine's KV cache holds: a tree of nodes over one free queue.

A context is a path of nodes; what contexts share is the same node and counts once. A node that
covers tokens [a, b) owns the blocks that end in it: b // B - a // B for blocks of B tokens.

The engine evicts by time of release, the last block of a context first. So one queue of released
nodes, oldest first, tells what an allocation will evict; `resident` counts the leading blocks of a
node that are still cached. Where the engine says otherwise, `correct` takes its word.

Three kinds of claim stand on a node: `users` (sessions that the scheduler knows), `holders`
(sessions whose KV it wants to keep) and `running` (steps in the engine, whose blocks cannot be
evicted). The blocks of nodes that are held or running are the `kept` blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set

from inference_service.scheduler.event import Node


class TreeNode:
    """One node of the tree of contexts; sizes in blocks, `start` and `end` in tokens."""

    __slots__ = ("end", "holders", "id", "resident", "running", "size", "start", "users")

    def __init__(self, node_id: str, start: int, end: int, size: int) -> None:
        self.id = node_id
        self.start = start
        self.end = end
        self.size = size
        self.resident = 0
        self.users = 0
        self.running = 0
        self.holders: dict[str, None] | None = None

    @property
    def is_kept(self) -> bool:
        """Whether a session or a running step lays claim to its blocks."""
        return self.running > 0 or bool(self.holders)


Chain = list[TreeNode]
"""The nodes of one context, root first."""


class KVModel:
    """Nodes, claims and the modelled free queue of one engine."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kept = 0
        """Blocks of nodes that are held or running, cached or not, each counted once."""
        self.running = 0
        """Those of them that belong to steps in the engine."""
        self._nodes: dict[str, TreeNode] = {}
        self._free: OrderedDict[TreeNode, None] = OrderedDict()
        self._resident = 0
        self._held_free = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def extended(self, chain: Chain, path: Sequence[Node]) -> Chain:
        """Return the chain of `path`, for a session that had `chain` (empty: none) until now."""
        common = 0
        for node, wanted in zip(chain, path, strict=False):
            if node.id != wanted.id:
                break
            common += 1
        new = chain[:common]
        for wanted in path[common:]:
            node = self._node(wanted, new[-1].end if new else 0)
            node.users += 1
            new.append(node)
        self._drop(chain[common:])
        return new

    def forget(self, chain: Chain) -> None:
        """Drop a session's chain; its blocks stay cached until they are evicted."""
        self._drop(chain)

    def cached_tokens(self, chain: Chain) -> int:
        """Return how many leading tokens of a context are believed cached, in whole blocks."""
        blocks = 0
        for node in chain:
            blocks += node.resident
            if node.resident < node.size:
                break
        return blocks * self.block_size

    def blocks(self, chain: Chain) -> int:
        """Return the whole blocks of a context."""
        return chain[-1].end // self.block_size if chain else 0

    def private_blocks(self, chain: Chain) -> int:
        """Return the blocks of a context that no other session shares."""
        return sum(node.size for node in chain if node.users == 1)

    def missing_blocks(self, chain: Chain) -> int:
        """Return the whole blocks of a context that are not believed cached."""
        return sum(node.size - node.resident for node in chain)

    def unkept_blocks(self, chain: Chain) -> int:
        """Return the blocks that running this context would add to the kept ones."""
        return sum(node.size for node in chain if not node.is_kept)

    def released_blocks(
        self, chain: Chain, holder: str, others: Set[str], spared: Sequence[TreeNode] = ()
    ) -> int:
        """Return the kept blocks that this holder alone keeps, once the `others` have let go.

        Those of the `spared` context are left out: what is to run needs them itself.
        """
        return sum(
            node.size
            for node in chain
            if node.holders and not node.running and holder in node.holders
            if all(name == holder or name in others for name in node.holders)
            if node not in spared
        )

    def hold(self, holder: str, chain: Chain) -> None:
        """Claim a context for a session; claiming twice is claiming once."""
        for node in chain:
            if not node.is_kept:
                self.kept += node.size
                self._held_free += node.resident
            if node.holders is None:
                node.holders = {}
            node.holders[holder] = None

    def release(self, holder: str, chain: Chain) -> None:
        """Give up a session's claim, if it has one; nothing is evicted by that."""
        for node in chain:
            if not node.holders or holder not in node.holders:
                continue
            del node.holders[holder]
            if node.holders:
                continue
            node.holders = None
            if not node.running:
                self.kept -= node.size
                self._held_free -= node.resident

    def enter(self, chain: Chain, tail_blocks: int) -> int:
        """Note that the engine has begun a context; return the blocks it had to allocate.

        What is cached leaves the free queue first, then the rest and the tail are allocated.
        """
        missing = tail_blocks
        for node in chain:
            if not node.running:
                self._free.pop(node, None)
                self.running += node.size
                if node.holders:
                    self._held_free -= node.resident
                else:
                    self.kept += node.size
            node.running += 1
            missing += node.size - node.resident
        self._allocate(missing)
        for node in chain:
            self._resident += node.size - node.resident
            node.resident = node.size
        return missing

    def grow(self, node: TreeNode, end: int) -> None:
        """Let the last node of a running context end later: tokens were generated."""
        assert node.running, "only what is in the engine grows"
        grown = end // self.block_size - node.end // self.block_size
        self._allocate(grown)
        node.end = end
        node.size += grown
        node.resident += grown
        self.kept += grown
        self.running += grown
        self._resident += grown

    def leave(self, chain: Chain) -> None:
        """Note that the engine has released a context: its last node is evicted first."""
        for node in reversed(chain):
            node.running -= 1
            assert node.running >= 0
            if not node.running:
                self.running -= node.size
                if node.holders:
                    self._held_free += node.resident
                else:
                    self.kept -= node.size
                self._queue(node)

    def touch(self, chain: Chain) -> None:
        """Note that the engine has used and released what is cached of a context."""
        for node in reversed(chain):
            if node in self._free:
                self._free.move_to_end(node)

    def correct(self, chain: Chain, cached_tokens: int) -> None:
        """Believe that of this context just the first `cached_tokens` tokens are cached."""
        blocks = cached_tokens // self.block_size
        for node in chain:
            resident = min(node.size, max(0, blocks - node.start // self.block_size))
            if not node.running and resident != node.resident:
                if resident > node.resident:
                    self._allocate(resident - node.resident, spare=node)
                self._set_resident(node, resident)

    def at_risk(self, num_blocks: int, chain: Chain) -> Iterator[str]:
        """Yield a holder of each held node that `num_blocks` allocated for a context would evict.

        What is cached of the context itself leaves the queue first.
        """
        ahead = self._blank
        own = set(chain)
        for node in self._free:
            if ahead >= num_blocks:
                return
            if node in own:
                continue
            if node.holders and node.resident:
                yield next(iter(node.holders))
            ahead += node.resident

    def unheld_free(self, chain: Chain) -> int:
        """Return the blocks that can be allocated for a context without evicting what is held.

        What is cached of the context itself is none of them: the engine uses it.
        """
        own = sum(n.resident for n in set(chain) if not n.running and not n.holders)
        return self._blank + max(0, self._resident - self.running - self._held_free - own)

    def clear(self) -> None:
        """Believe that nothing is cached."""
        for node in list(self._nodes.values()):
            if not node.running:
                self._set_resident(node, 0)

    def check_integrity(self) -> None:
        """Assert that the counts are those of the nodes."""
        nodes = list(self._nodes.values())
        assert all(0 <= node.resident <= node.size for node in nodes)
        assert self.kept == sum(node.size for node in nodes if node.is_kept)
        assert self.running == sum(node.size for node in nodes if node.running)
        assert self._resident == sum(node.resident for node in nodes)
        held = [node for node in nodes if node.holders and not node.running]
        assert self._held_free == sum(node.resident for node in held)
        free = {node for node in nodes if node.resident and not node.running}
        assert free == set(self._free), "the free queue holds what is cached and not running"
        assert all(node.users or node.is_kept or node.resident for node in nodes)

    @property
    def _blank(self) -> int:
        """Blocks that hold nothing anybody could use; the engine allocates them first."""
        return max(0, self.num_blocks - self._resident)

    def _node(self, wanted: Node, start: int) -> TreeNode:
        node = self._nodes.get(wanted.id)
        node_id = wanted.id
        if node and (node.start, node.end) != (start, wanted.end):
            node_id = f"{wanted.id}@{start}-{wanted.end}"
            node = self._nodes.get(node_id)
        if node is None:
            assert wanted.end >= start, (wanted, start)
            size = wanted.end // self.block_size - start // self.block_size
            node = self._nodes[node_id] = TreeNode(node_id, start, wanted.end, size)
        return node

    def _drop(self, chain: Chain) -> None:
        for node in chain:
            node.users -= 1
            self._collect(node)

    def _collect(self, node: TreeNode) -> None:
        if not (node.users or node.resident or node.is_kept):
            self._nodes.pop(node.id, None)

    def _queue(self, node: TreeNode) -> None:
        if node.resident:
            self._free[node] = None
        else:
            self._collect(node)

    def _allocate(self, num_blocks: int, spare: TreeNode | None = None) -> None:
        """Evict from the head of the queue what blank blocks do not cover."""
        wanted = num_blocks - self._blank
        while wanted > 0:
            node = next((node for node in self._free if node is not spare), None)
            if node is None:
                return
            taken = min(wanted, node.resident)
            wanted -= taken
            self._set_resident(node, node.resident - taken)

    def _set_resident(self, node: TreeNode, resident: int) -> None:
        self._resident += resident - node.resident
        if node.holders and not node.running:
            self._held_free += resident - node.resident
        node.resident = resident
        if not resident:
            self._free.pop(node, None)
            self._collect(node)
        elif not node.running and node not in self._free:
            self._free[node] = None
