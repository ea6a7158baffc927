"""Properties of the simulated KV cache."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference_service.engine.block_pool import BlockPool

SIZE = 8


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, SIZE)), max_size=60))
def test_blocks_are_free_or_referenced_and_names_agree(moves: list[tuple[int, int]]) -> None:
    pool = BlockPool(SIZE)
    held: list[list[int]] = []
    for kind, number in moves:
        if kind == 0 and held:
            pool.release(held.pop(number % len(held)))
        else:
            keys = [kind * 100 + n for n in range(number)]
            cached = pool.find(keys)
            new = pool.take(cached, number - len(cached))
            if new is not None:
                for block, key in zip(new, keys[len(cached) :], strict=True):
                    pool.name(block, key)
                held.append([*cached, *new])
        pool.check_integrity()
        assert pool.num_free + len({block for blocks in held for block in blocks}) == SIZE


def test_taking_more_than_is_free_changes_nothing() -> None:
    pool = BlockPool(4)
    kept = pool.take((), 2)
    assert kept is not None
    for key, block in enumerate(kept):
        pool.name(block, key)
    pool.release(kept)
    assert pool.take(pool.find([0, 1]), 3) is None
    assert pool.num_free == 4
    assert pool.find([0, 1]) == kept


def test_last_block_of_a_released_sequence_is_evicted_first() -> None:
    pool = BlockPool(3)
    blocks = pool.take((), 3)
    assert blocks is not None
    for key, block in enumerate(blocks):
        pool.name(block, key)
    pool.release(blocks)
    pool.take((), 1)
    assert pool.find([0, 1, 2]) == blocks[:2]


def test_prefix_held_twice_is_found_until_both_blocks_are_evicted() -> None:
    pool = BlockPool(2)
    first, second = pool.take((), 1), pool.take((), 1)
    assert first is not None
    assert second is not None
    pool.name(first[0], 7)
    pool.name(second[0], 7)
    pool.release(first)
    pool.release(second)
    assert pool.take((), 1) == first
    assert pool.find([7]) == second
    assert pool.take((), 1) == second
    assert pool.find([7]) == []
    assert pool.forgotten == [7, 7]
    pool.check_integrity()


def test_reset_forgets_prefixes_only_when_nothing_is_referenced() -> None:
    pool = BlockPool(2)
    blocks = pool.take((), 1)
    assert blocks is not None
    pool.name(blocks[0], 7)
    assert not pool.reset()
    pool.release(blocks)
    assert pool.reset()
    assert pool.find([7]) == []
