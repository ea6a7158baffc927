"""The simulated KV cache: blocks of fixed size, shared by prefix, evicted by time of release.

As in vLLM: a block is named by the prefix that ends in it, and two blocks may hold the same prefix,
since a sequence never changes a block that it has. A block that no sequence references goes to one
free queue: to its tail if it holds a named prefix, which stays cached, to its head if not. New
blocks are taken from the head, and taking a block forgets the prefix it held.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """`num_blocks` KV blocks. A block's key names the whole prefix that ends in it.

    `forgotten` gathers the keys of blocks whose prefix was forgotten, one for each block, until the
    owner takes them away.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.forgotten: list[int] = []
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._key_of: list[int | None] = [None] * num_blocks
        self._blocks_of: dict[int, list[int]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks no sequence references, cached or not."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks that a sequence references, from 0 to 1."""
        return 1.0 - len(self._free) / self.num_blocks

    def find(self, keys: Iterable[int]) -> list[int]:
        """Return the cached blocks of the longest prefix of `keys`; references are unchanged."""
        found: list[int] = []
        for key in keys:
            blocks = self._blocks_of.get(key)
            if blocks is None:
                break
            found.append(blocks[0])
        return found

    def fits(self, cached: Sequence[int], num_new: int) -> bool:
        """Whether `take` would find the blocks."""
        idle = sum(1 for block in cached if self._references[block] == 0)
        return num_new <= len(self._free) - idle

    def take(self, cached: Sequence[int], num_new: int) -> list[int] | None:
        """Reference the `cached` blocks and `num_new` others; None, changing nothing, if short.

        Returns the new blocks only.
        """
        if not self.fits(cached, num_new):
            return None
        for block in cached:
            self._free.pop(block, None)
            self._references[block] += 1
        return [self._take_oldest() for _ in range(num_new)]

    def name(self, block: int, key: int) -> None:
        """Make a referenced block findable by `key`, behind others that hold the same."""
        assert self._references[block] > 0
        assert self._key_of[block] is None
        self._blocks_of.setdefault(key, []).append(block)
        self._key_of[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each of a sequence's blocks; its last block is evicted first."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0
            if self._references[block] == 0:
                self._free[block] = None
                if self._key_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Forget all cached prefixes; False, changing nothing, while any block is referenced."""
        if len(self._free) < self.num_blocks:
            return False
        self._blocks_of.clear()
        self.forgotten.clear()
        self._key_of = [None] * self.num_blocks
        return True

    def check_integrity(self) -> None:
        """Assert that the free queue, the references and the names agree."""
        assert all((self._references[b] == 0) == (b in self._free) for b in range(self.num_blocks))
        named = {block: key for key, blocks in self._blocks_of.items() for block in blocks}
        assert named == {b: key for b, key in enumerate(self._key_of) if key is not None}
        assert all(self._blocks_of.values())

    def _take_oldest(self) -> int:
        block, _ = self._free.popitem(last=False)
        key = self._key_of[block]
        if key is not None:
            blocks = self._blocks_of[key]
            blocks.remove(block)
            if not blocks:
                del self._blocks_of[key]
            self._key_of[block] = None
            self.forgotten.append(key)
        self._references[block] = 1
        return block
