"""KV events of vLLM's own publisher reach the mirror, whatever was missed on the way."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from inference_service.engine.cache_mirror import CacheMirror
from inference_service.engine.vllm_event import EventFollower
from tests.engine.request import until

pytestmark = pytest.mark.vllm

SIZE = 4
A, B, C = (list(range(start, start + SIZE)) for start in (0, 10, 20))
WITHIN_S = 10.0


@contextmanager
def published(config: dict[str, Any]) -> Iterator[Any]:
    """Yield a publisher as vLLM's scheduler makes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, at its import
        from vllm.config import KVEventsConfig
        from vllm.distributed.kv_events import EventPublisherFactory
    publisher = EventPublisherFactory.create(KVEventsConfig(**config))
    try:
        yield publisher
    finally:
        publisher.shutdown()


@asynccontextmanager
async def following() -> AsyncIterator[EventFollower]:
    """Yield a follower that is closed at the end."""
    follower = EventFollower()
    try:
        yield follower
    finally:
        await follower.close()


def stored(name: bytes | int, parent: bytes | int | None, ids: list[int], **more: Any) -> Any:
    """Return the event that stores one block."""
    from vllm.distributed.kv_events import BlockStored

    fields = {"block_size": SIZE, "lora_id": None, "medium": "GPU", "lora_name": None, **more}
    return BlockStored(block_hashes=[name], parent_block_hash=parent, token_ids=ids, **fields)


def removed(name: bytes | int, group: int | None = None) -> Any:
    """Return the event that evicts one block."""
    from vllm.distributed.kv_events import BlockRemoved

    return BlockRemoved(block_hashes=[name], medium="GPU", group_idx=group)


def publish(publisher: Any, *events: Any) -> None:
    """Publish one batch."""
    from vllm.distributed.kv_events import KVEventBatch

    publisher.publish(KVEventBatch(ts=0.0, events=list(events)))


def cleared() -> Any:
    """Return the event of a reset."""
    from vllm.distributed.kv_events import AllBlocksCleared

    return AllBlocksCleared()


async def until_cached(mirror: CacheMirror, ids: list[int], expected: int | None) -> None:
    """Wait until the mirror says so of a prompt of `ids` and one more."""

    async def holds() -> bool:
        return mirror.num_cached_tokens([*ids, 99]) == expected

    await until(holds, WITHIN_S)


async def joined(follower: EventFollower, publisher: Any) -> None:
    """Wait until what is published arrives: a subscription takes a moment."""

    async def holds() -> bool:
        publish(publisher)
        return follower._next > 0

    await until(holds, WITHIN_S)


@pytest.mark.parametrize("names", [(b"a", b"ab"), (1, 2)])
async def test_what_was_published_before_anyone_followed_is_asked_for(names: Any) -> None:
    mirror = CacheMirror(SIZE)
    async with following() as follower:
        late = {**follower.config, "endpoint": follower.config["endpoint"] + "-late"}
        with published(late) as publisher:
            publish(publisher, stored(names[0], None, A))
            publish(publisher, stored(names[1], names[0], B), stored(names[0], None, A))
            await asyncio.to_thread(publisher._event_queue.join)
            follower._events.connect(late["endpoint"])
            follower.follow(mirror)
            await joined(follower, publisher)
            assert mirror.num_cached_tokens([*A, *B, 99]) == 8
            publish(publisher, removed(names[0]))
            publish(publisher, removed(names[1]))
            await until_cached(mirror, A + B, 4)
    assert not mirror.is_degraded


async def test_what_the_engine_has_forgotten_degrades_the_mirror_until_a_reset() -> None:
    mirror = CacheMirror(SIZE)
    async with following() as follower:
        with published({**follower.config, "buffer_steps": 1}) as publisher:
            follower.follow(mirror)
            await joined(follower, publisher)
            # Late to join, the follower may have lost a batch: this one begins anew.
            publish(publisher, cleared(), stored(b"a", None, A))
            await until_cached(mirror, A, 4)
            for _ in range(2):
                next(publisher._seq_gen)  # two batches are lost
            publish(publisher, stored(b"ab", b"a", B))
            await until_cached(mirror, A, None)
            publish(publisher, cleared(), stored(b"c", None, C))
            await until_cached(mirror, C, 4)
            await until_cached(mirror, A, 0)


async def test_reset_holds_at_once_and_what_was_published_before_it_is_dropped() -> None:
    mirror = CacheMirror(SIZE)
    async with following() as follower:
        with published(follower.config) as publisher:
            follower.follow(mirror)
            await joined(follower, publisher)
            publish(publisher, stored(b"a", None, A))
            await until_cached(mirror, A, 4)
            follower.reset_done()
            assert mirror.num_cached_tokens([*A, 99]) == 0
            publish(publisher, stored(b"ab", b"a", B))
            publish(publisher, cleared(), stored(b"c", None, C))
            await until_cached(mirror, C, 4)
            assert mirror.num_cached_tokens([*A, *B, 99]) == 0
            publish(publisher, cleared(), stored(b"a", None, A))
            await until_cached(mirror, A, 4)
            follower.reset_done()
            assert mirror.num_cached_tokens([*A, 99]) == 4, "its event had come already"


async def test_blocks_of_sliding_windows_and_of_other_sizes_are_left_out() -> None:
    mirror = CacheMirror(SIZE)
    async with following() as follower:
        with published(follower.config) as publisher:
            follower.follow(mirror)
            await joined(follower, publisher)
            publish(
                publisher,
                stored(b"a", None, A, group_idx=0, kv_cache_spec_sliding_window=4),
                stored(b"a", None, A, group_idx=1),
                stored(b"b", None, A + B, group_idx=2, block_size=2 * SIZE),
                removed(b"a", group=0),
            )
            await until_cached(mirror, A, 4)
            assert mirror.num_blocks == 1
            publish(publisher, removed(b"a", group=1))
            await until_cached(mirror, A, 0)


async def test_events_that_cannot_be_read_degrade_the_mirror(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mirror = CacheMirror(SIZE)
    async with following() as follower:
        with published(follower.config) as publisher:
            follower.follow(mirror)
            await joined(follower, publisher)
            publish(publisher, {"type": "BlockStored"})
            await until_cached(mirror, A, None)
            follower.reset_done()
            assert mirror.is_degraded, "nobody follows any more"
    assert "cannot be read" in caplog.text
