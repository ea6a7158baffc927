"""Follow vLLM's KV events into a mirror of its prefix cache.

Theory of operation. vLLM publishes one batch of events per engine step that stored or evicted
blocks, numbered from 0 without a gap. A batch that is missing (the subscriber came late, a queue
was full) is asked for at the replay endpoint; what vLLM has forgotten degrades the mirror.

A reset of the cache is published with the next engine step that stores or evicts, which may be long
after it. So the mirror is cleared at once when the engine says that the reset is done, and what was
published before it, but comes later, is dropped: until the reset's own event.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any, TypeAlias

from inference_service.engine.cache_mirror import CacheMirror

log = logging.getLogger(__name__)

BUFFER_STEPS = 1_000
"""Batches that vLLM keeps for a replay; a few kilobytes each."""

REPLAY_S = 10.0
"""How long a replay may take; vLLM answers at the end of the engine step in progress."""

END_OF_REPLAY = -1

Event: TypeAlias = dict[str, Any]


class EventFollower:
    """Follows one start of vLLM, over sockets in a directory that only we can read.

    Make it before vLLM is launched with `config`: it listens then before the first event.
    """

    def __init__(self) -> None:
        import zmq.asyncio

        self._mirror: CacheMirror | None = None
        self._task: asyncio.Task[None] | None = None
        self._directory = Path(tempfile.mkdtemp(prefix="muster-kv-"))
        self._next = 0
        self._resets = 0
        self._clears = 0
        self._group: int | None = None
        self._context = zmq.asyncio.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.set(zmq.RCVHWM, 0)
        self._events.subscribe(b"")
        self._events.connect(self._endpoint("events"))

    @property
    def config(self) -> dict[str, Any]:
        """The settings with which vLLM publishes here."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self._endpoint("events"),
            "replay_endpoint": self._endpoint("replay"),
            "buffer_steps": BUFFER_STEPS,
        }

    def follow(self, mirror: CacheMirror) -> None:
        """Feed `mirror` from now on, beginning with the first event of all."""
        assert self._task is None
        self._task = asyncio.create_task(self._follow(mirror), name="kv-events")
        self._mirror = mirror

    def reset_done(self) -> None:
        """Note that vLLM has forgotten all cached prefixes."""
        assert self._mirror is not None
        assert self._task is not None
        self._resets += 1
        if self._clears < self._resets and not self._task.done():
            self._mirror.cleared()

    async def close(self) -> None:
        """Stop following; idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self._directory}/{name}"

    async def _follow(self, mirror: CacheMirror) -> None:
        try:
            while True:
                _, number, payload = await self._events.recv_multipart()
                await self._take(int.from_bytes(number, "big"), payload, mirror)
        except Exception:
            log.exception("vLLM's KV events cannot be read; the prefix cache is unknown")
            mirror.gap()

    async def _take(self, number: int, payload: bytes, mirror: CacheMirror) -> None:
        """Apply a batch, and before it those that were missed."""
        if number > self._next:
            try:
                async with asyncio.timeout(REPLAY_S):
                    await self._replay(number, mirror)
            except TimeoutError:
                log.warning("vLLM replays no KV events")
        if number > self._next:
            log.warning("KV events lost", extra={"first": self._next, "next": number})
            self._clears = max(self._clears, self._resets)
            mirror.gap()
        if number >= self._next:
            self._apply(payload, mirror)
            self._next = number + 1

    async def _replay(self, until: int, mirror: CacheMirror) -> None:
        """Apply the batches before `until`, as far as vLLM still has them."""
        import zmq

        socket = self._context.socket(zmq.DEALER)
        try:
            socket.connect(self._endpoint("replay"))
            await socket.send_multipart([b"", self._next.to_bytes(8, "big")])
            while True:
                _, _, number_bytes, payload = await socket.recv_multipart()
                number = int.from_bytes(number_bytes, "big", signed=True)
                if number == END_OF_REPLAY:
                    return
                if number == self._next < until:
                    self._apply(payload, mirror)
                    self._next += 1
        finally:
            socket.close(linger=0)

    def _apply(self, payload: bytes, mirror: CacheMirror) -> None:
        import msgspec

        _, events, *_ = msgspec.msgpack.decode(payload)
        evicted: list[int | bytes] = []
        for event in events:
            kind = event["type"]
            if kind == "AllBlocksCleared":
                evicted.clear()
                self._cleared(mirror)
            elif self._clears < self._resets:
                continue
            elif kind == "BlockRemoved" and event.get("group_idx") == self._group:
                evicted += event["block_hashes"]
            elif kind == "BlockStored" and self._is_followed(event, mirror):
                mirror.removed(evicted)
                evicted.clear()
                mirror.stored(event["block_hashes"], event["parent_block_hash"], event["token_ids"])
        mirror.removed(evicted)

    def _cleared(self, mirror: CacheMirror) -> None:
        self._clears += 1
        if self._clears > self._resets:
            mirror.cleared()

    def _is_followed(self, event: Event, mirror: CacheMirror) -> bool:
        """Whether a block is of the group that sees whole prefixes.

        Hybrid models keep several groups of layers; those with a sliding window hold less, so the
        mirror is an upper bound there.
        """
        if event["block_size"] != mirror.block_size or event.get("kv_cache_spec_sliding_window"):
            return False
        if self._group is None:
            self._group = event.get("group_idx")
        return bool(event.get("group_idx") == self._group)
