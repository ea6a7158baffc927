"""What the engine has cached of waiting sessions: watched, and told when it changes.

A session is watched while it waits: while its tools are out (its whole context), and while its next
step is in line (as much of the prompt as was cached when the step became ready, or was touched
since). It is watched no more from the dispatch on: the engine says then itself what it found.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from inference_service.engine.cache_mirror import CacheMirror
from inference_service.leaf import Leaf
from inference_service.session import Prompt


@dataclass(frozen=True, slots=True)
class _Watched:
    """A waiting session, and the prompt of its step if that is in line."""

    leaf: Leaf
    prompt: Prompt | None

    @property
    def token_ids(self) -> array[int] | None:
        """What would be computed next, None where the ids are not kept any more."""
        return self.prompt.token_ids if self.prompt else self.leaf.token_ids


class CacheWatch:
    """Follows waiting sessions in the engine's prefix cache; without one, it does nothing.

    `evicted(session, cached_tokens)` tells that only so much of a session's context is left.
    """

    def __init__(self, cache: CacheMirror | None, evicted: Callable[[str, int], None]) -> None:
        self._cache = cache
        self._evicted = evicted
        self._watched: dict[str, _Watched] = {}
        self._lost: dict[str, None] = {}
        if cache is not None:
            cache.on_evicted = self._note_eviction

    def __len__(self) -> int:
        return len(self._watched)

    def acting(self, leaf: Leaf) -> None:
        """Watch a session whose tools are out."""
        self._begin(_Watched(leaf, None), len(leaf.token_ids or ()))

    def ready(self, leaf: Leaf, prompt: Prompt) -> int | None:
        """Watch a session whose step waits; return how much of its prompt is cached.

        None: nobody tells.
        """
        self.end(leaf.session)
        if self._cache is None:
            return None
        del leaf.keys[prompt.kept // self._cache.block_size :]
        cached_tokens = self._cache.num_cached_tokens(prompt.token_ids, leaf.keys)
        self._begin(_Watched(leaf, prompt), cached_tokens or 0)
        return cached_tokens

    def touched(self, session: str, num_tokens: int) -> None:
        """Watch a session anew of which a touch has left so many tokens cached, if it waits."""
        if watched := self._watched.get(session):
            self._begin(watched, num_tokens)

    def end(self, session: str) -> None:
        """Watch a session no more; one that is not watched is no error."""
        if self._watched.pop(session, None) and self._cache is not None:
            self._cache.unwatch(session)

    def _begin(self, watched: _Watched, num_tokens: int) -> None:
        """Watch the end of a context's first `num_tokens`."""
        token_ids, leaf = watched.token_ids, watched.leaf
        if self._cache is None or token_ids is None:
            return
        self._watched[leaf.session] = watched
        keys = self._cache.extend(leaf.keys, token_ids[:num_tokens])
        num_blocks = num_tokens // self._cache.block_size
        self._cache.watch(leaf.session, token_ids[:num_tokens], keys[:num_blocks])

    def _note_eviction(self, session: str) -> None:
        """Note it for the end of this turn of the loop: one engine step evicts many blocks."""
        if not self._lost:
            asyncio.get_running_loop().call_soon(self._tell)
        self._lost[session] = None

    def _tell(self) -> None:
        sessions, self._lost = list(self._lost), {}
        for session in sessions:
            watched = self._watched.get(session)
            token_ids = watched.token_ids if watched else None
            if watched is None or token_ids is None or self._cache is None:
                continue
            left = self._cache.num_cached_tokens(token_ids, watched.leaf.keys)
            if left is not None:
                self._evicted(session, left)
