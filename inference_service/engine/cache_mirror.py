"""What an engine's prefix cache holds, by the engine's own word: a mirror fed by its KV events.

Theory of operation. The engine names a block by a hash of its own, which says nothing of the tokens
in it; the event that stores a block tells its tokens and its parent. From these the mirror makes a
key of its own: a hash over the parent's key and the block's token ids, so a key names the whole
prefix that ends in the block. To ask how much of a prompt is cached is to walk its keys until one
is not held.

An engine may hold a prefix twice (two requests computed it at once), and tells so twice, so keys
are counted. When events are lost nothing can be said any more: the mirror is degraded, and answers
None, until the engine's cache is cleared, whatever is told to it between.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

EngineHash = int | bytes
"""An engine's own name of a block, whatever it is made of."""

ID_TYPE = "i"
"""Token ids as 32-bit numbers: their bytes are what is hashed."""

ID_BYTES = array(ID_TYPE).itemsize


@dataclass(slots=True)
class _Watch:
    """The keys of a watched prefix and those of them that are waited on, by index."""

    keys: array[int]
    indices: list[int]


class CacheMirror:
    """The blocks that one engine's prefix cache holds. Lives on the event loop.

    `on_evicted` is called with a watch's name; `is_degraded` says that events were lost.
    """

    def __init__(self, block_size: int) -> None:
        assert block_size > 0
        self.block_size = block_size
        self.is_degraded = False
        self.on_evicted: Callable[[str], None] | None = None
        self._key_of: dict[EngineHash, int] = {}
        self._count: dict[int, int] = {}
        self._watches: dict[str, _Watch] = {}
        self._names: dict[int, set[str]] = {}

    @property
    def num_blocks(self) -> int:
        """Different prefixes held, each one block longer than the one it grew from."""
        return len(self._count)

    def num_cached_tokens(
        self, token_ids: array[int] | Sequence[int], keys: array[int] | None = None
    ) -> int | None:
        """Return how much of such a prompt the engine would not compute again, in tokens.

        Whole blocks; never the prompt's last token, which every engine computes. None if the
        mirror is degraded. `keys` as in `extend`: who keeps them pays for new blocks only.
        """
        if self.is_degraded:
            return None
        keys = self.extend(array("q") if keys is None else keys, token_ids)
        num_blocks = (len(token_ids) - 1) // self.block_size
        num_cached = 0
        for key in keys[:num_blocks]:
            if key not in self._count:
                break
            num_cached += self.block_size
        return num_cached

    def extend(self, keys: array[int], token_ids: array[int] | Sequence[int]) -> array[int]:
        """Append to `keys`, those of a context's first whole blocks, what its others have."""
        num_blocks = len(token_ids) // self.block_size
        new = token_ids[len(keys) * self.block_size : num_blocks * self.block_size]
        keys.extend(self._keys(new, num_blocks - len(keys), keys[-1] if keys else 0))
        return keys

    def watch(
        self,
        name: str,
        token_ids: array[int] | Sequence[int],
        keys: array[int] | None = None,
    ) -> None:
        """Tell by `on_evicted` when the end of this context leaves the cache: tails go first.

        The context's last token has no KV yet, so its last whole block may never be stored: the
        one before it is watched too. After each call the watch moves on to the last block still
        held, and ends with the last. A context that was computed anew is to be watched anew; the
        same name replaces. `keys` as in `extend`.
        """
        self.unwatch(name)
        keys = self.extend(array("q") if keys is None else keys, token_ids)
        watch = _Watch(keys[:], [])
        self._watches[name] = watch
        self._wait_on(name, watch, list(range(max(0, len(keys) - 2), len(keys))))

    def unwatch(self, name: str) -> None:
        """End a watch; one that is not known is no error."""
        watch = self._watches.pop(name, None)
        if watch is not None:
            self._wait_on(name, watch, [])

    def stored(
        self,
        hashes: Sequence[EngineHash],
        parent_hash: EngineHash | None,
        token_ids: Sequence[int],
    ) -> None:
        """Note blocks that were stored one after the other behind `parent_hash` (None: a start)."""
        assert len(token_ids) == len(hashes) * self.block_size, (len(token_ids), len(hashes))
        if self.is_degraded:
            return
        if parent_hash is not None and parent_hash not in self._key_of:
            self.gap()
            return
        before = 0 if parent_hash is None else self._key_of[parent_hash]
        for name, key in zip(hashes, self._keys(token_ids, len(hashes), before), strict=True):
            self._key_of[name] = key
            self._count[key] = self._count.get(key, 0) + 1

    def removed(self, hashes: Sequence[EngineHash]) -> None:
        """Note blocks that were evicted, and tell who watched them."""
        touched: dict[str, None] = {}
        for name in hashes:
            key = self._key_of.get(name)
            if key is None:
                continue
            self._count[key] -= 1
            if self._count[key] == 0:
                del self._count[key], self._key_of[name]
                touched.update(dict.fromkeys(sorted(self._names.get(key, ()))))
        for watched in touched:
            self._move_on(watched)
        self._tell(touched)

    def cleared(self) -> None:
        """Note that the cache is empty; every watch has been told, and has ended, after it."""
        self.is_degraded = False
        self._forget()
        lost = list(self._watches)
        self._watches.clear()
        self._names.clear()
        self._tell(lost)

    def gap(self) -> None:
        """Note that events were lost. Watches stay, silent, until the cache is cleared."""
        self.is_degraded = True
        self._forget()

    def _forget(self) -> None:
        self._key_of.clear()
        self._count.clear()

    def _keys(
        self, token_ids: array[int] | Sequence[int], num_blocks: int, key: int = 0
    ) -> Iterator[int]:
        """Yield the keys of the first `num_blocks` whole blocks, behind the block of `key`."""
        data, width = array(ID_TYPE, token_ids).tobytes(), self.block_size * ID_BYTES
        for end in range(width, (num_blocks + 1) * width, width):
            key = hash((key, data[end - width : end]))
            yield key

    def _wait_on(self, name: str, watch: _Watch, indices: list[int]) -> None:
        for index in watch.indices:
            names = self._names.get(watch.keys[index], set())
            names.discard(name)
            if not names:
                self._names.pop(watch.keys[index], None)
        watch.indices = indices
        for index in indices:
            self._names.setdefault(watch.keys[index], set()).add(name)

    def _move_on(self, name: str) -> None:
        """Let a watch wait on the last of its blocks that is still held, or end it."""
        watch = self._watches[name]
        index = max(watch.indices)
        while index >= 0 and watch.keys[index] not in self._count:
            index -= 1
        self._wait_on(name, watch, [index] if index >= 0 else [])
        if index < 0:
            del self._watches[name]

    def _tell(self, names: Iterable[str]) -> None:
        if self.on_evicted is not None:
            for name in names:
                self.on_evicted(name)
