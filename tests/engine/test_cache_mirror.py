"""The mirror of the prefix cache says what an engine that tells all of it holds."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.llm_step import FinishReason
from inference_service.engine.cache_mirror import CacheMirror, EngineHash
from inference_service.engine.simulation import CostModel, Generation, Simulation

SIZE = 4
A, B, C = (list(range(start, start + SIZE)) for start in (0, 10, 20))


def a_mirror() -> tuple[CacheMirror, list[str]]:
    """Return a mirror of A, A+B and A+B+C, and the list of names that it will tell."""
    mirror, told = CacheMirror(SIZE), list[str]()
    mirror.on_evicted = told.append
    mirror.stored([b"a", b"ab"], None, A + B)
    mirror.stored([b"abc"], b"ab", C)
    return mirror, told


def test_longest_prefix_of_whole_blocks_without_the_last_token_is_cached() -> None:
    mirror, _ = a_mirror()
    assert mirror.num_cached_tokens([*A, *B, *C, 99]) == 12
    assert mirror.num_cached_tokens([*A, *B, *C]) == 8
    assert mirror.num_cached_tokens([*A, *B, 99]) == 8
    assert mirror.num_cached_tokens([*A, *C, *B, 99]) == 4
    assert mirror.num_cached_tokens([*B, *C, 99]) == 0
    assert mirror.num_cached_tokens(A[:3]) == 0
    assert mirror.num_cached_tokens([]) == 0
    assert mirror.num_blocks == 3


@pytest.mark.parametrize("typecode", ["i", "I", "q"])
def test_ids_may_come_in_any_array(typecode: str) -> None:
    mirror, _ = a_mirror()
    assert mirror.num_cached_tokens(array(typecode, [*A, *B, *C, 99])) == 12


@pytest.mark.parametrize("names", [[b"x", b"y"], [1, 2]])
def test_engine_may_name_blocks_by_numbers_or_bytes(names: list[EngineHash]) -> None:
    mirror = CacheMirror(SIZE)
    mirror.stored(names, None, A + B)
    assert mirror.num_cached_tokens([*A, *B, 99]) == 8
    mirror.removed(names[1:])
    assert mirror.num_cached_tokens([*A, *B, 99]) == 4


def test_prefix_whose_middle_is_evicted_ends_there_and_is_whole_again_when_it_is_back() -> None:
    mirror, _ = a_mirror()
    mirror.removed([b"ab"])
    assert mirror.num_cached_tokens([*A, *B, *C, 99]) == 4
    mirror.stored([b"ab"], b"a", B)
    assert mirror.num_cached_tokens([*A, *B, *C, 99]) == 12


def test_prefix_held_twice_is_held_until_both_are_evicted() -> None:
    mirror, told = a_mirror()
    mirror.stored([b"abc"], b"ab", C)
    mirror.watch("s", [*A, *B, *C, 99])
    mirror.removed([b"abc"])
    assert mirror.num_cached_tokens([*A, *B, *C, 99]) == 12
    assert told == []
    mirror.removed([b"abc"])
    assert mirror.num_cached_tokens([*A, *B, *C, 99]) == 8
    assert told == ["s"]


def test_watch_tells_once_for_blocks_evicted_together_and_follows_the_tail() -> None:
    mirror, told = a_mirror()
    mirror.watch("s", [*A, *B, *C, 99])
    mirror.removed([b"abc", b"ab"])
    assert told == ["s"]
    mirror.removed([b"a"])
    assert told == ["s", "s"]
    mirror.stored([b"a"], None, A)
    mirror.removed([b"a"])
    assert told == ["s", "s"], "a watch ends with the last block"


def test_watch_holds_though_its_last_whole_block_is_not_stored() -> None:
    mirror, told = a_mirror()
    mirror.watch("s", [*A, *B, *C, *A])
    mirror.removed([b"abc"])
    assert told == ["s"]


def test_watch_set_before_the_blocks_are_stored_holds() -> None:
    mirror, told = CacheMirror(SIZE), list[str]()
    mirror.on_evicted = told.append
    mirror.watch("s", [*A, *B, 99])
    mirror.stored([b"a", b"ab"], None, A + B)
    assert told == []
    mirror.removed([b"ab"])
    assert told == ["s"]


def test_everyone_who_watches_a_shared_block_is_told_and_nobody_after_unwatch() -> None:
    mirror, told = a_mirror()
    for name in ("s", "t", "u"):
        mirror.watch(name, [*A, *B, *C, 99])
    mirror.unwatch("t")
    mirror.unwatch("t")
    mirror.watch("u", [*A, 99])
    mirror.removed([b"abc"])
    assert told == ["s"]
    mirror.removed([b"ab", b"a"])
    assert sorted(told) == ["s", "s", "u"]


def test_watcher_may_watch_and_unwatch_when_told() -> None:
    mirror, told = a_mirror()

    def tell(name: str) -> None:
        told.append(name)
        mirror.unwatch("s")
        mirror.unwatch("t")

    mirror.on_evicted = tell
    mirror.watch("s", [*A, *B, *C, 99])
    mirror.watch("t", [*A, *B, *C, 99])
    mirror.removed([b"abc"])
    mirror.removed([b"ab"])
    assert told == ["s", "t"]


def test_clearing_forgets_all_and_tells_every_watcher() -> None:
    mirror, told = a_mirror()
    mirror.watch("s", [*A, *B, *C, 99])
    mirror.cleared()
    assert mirror.num_cached_tokens([*A, *B, *C, 99]) == 0
    assert mirror.num_blocks == 0
    assert told == ["s"]


def test_after_a_gap_nothing_is_said_until_the_cache_is_cleared() -> None:
    mirror, told = a_mirror()
    mirror.watch("s", [*A, *B, *C, 99])
    mirror.gap()
    assert mirror.is_degraded
    assert mirror.num_cached_tokens([*A, 99]) is None
    mirror.stored([b"a"], None, A)
    mirror.removed([b"abc"])
    assert mirror.num_cached_tokens([*A, 99]) is None
    assert told == []
    mirror.cleared()
    assert told == ["s"]
    mirror.stored([b"a"], None, A)
    assert mirror.num_cached_tokens([*A, 99]) == 4


def test_block_behind_an_unknown_one_is_a_gap() -> None:
    mirror, _ = a_mirror()
    mirror.stored([b"xyz"], b"xy", C)
    assert mirror.is_degraded


def test_removal_of_an_unknown_block_changes_nothing() -> None:
    mirror, _ = a_mirror()
    mirror.removed([b"zzz"])
    assert not mirror.is_degraded
    assert mirror.num_blocks == 3


PROMPTS = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=40)
REQUESTS = st.lists(st.tuples(PROMPTS, st.integers(1, 12), st.integers(0, 2)), max_size=12)


@given(REQUESTS, st.integers(14, 40))
def test_mirror_of_a_simulated_engine_agrees_with_its_cache_after_every_step(
    requests: list[tuple[list[int], int, int]], num_blocks: int
) -> None:
    mirror = CacheMirror(SIZE)
    engine = Simulation(
        cost=CostModel(),
        num_blocks=num_blocks,
        block_size=SIZE,
        max_num_seqs=3,
        max_num_batched_tokens=16,
        cache=mirror,
    )
    for number, (prompt, num_answer, num_steps) in enumerate(requests):
        generation = Generation(
            list(prompt), [9] * num_answer, FinishReason.STOP, 0, number, arrived_s=0.0
        )
        engine.add(generation)
        for _ in range(num_steps):
            _step(engine)
        for asked, _, _ in requests:
            assert mirror.num_cached_tokens(asked) == engine.num_cached_tokens(asked)
    while _step(engine):
        pass
    for asked, _, _ in requests:
        assert mirror.num_cached_tokens([*asked, 9]) == engine.num_cached_tokens([*asked, 9])
    engine.pool.check_integrity()
    assert engine.reset_prefix_cache()
    assert mirror.num_blocks == 0


def _step(engine: Simulation) -> bool:
    step = engine.schedule(0.0)
    if step is not None:
        engine.update(step, 0.0)
    return step is not None


def test_kept_keys_are_those_of_the_whole_context_and_new_blocks_alone_are_added() -> None:
    mirror = CacheMirror(4)
    mirror.stored([1, 2, 3], None, [*A, *B, *C])
    keys = mirror.extend(array("q"), [*A, *B, 99])
    kept = list(keys)
    assert mirror.num_cached_tokens([*A, *B, *C, 99], keys) == 12
    assert list(keys[:2]) == kept
    assert keys == mirror.extend(array("q"), [*A, *B, *C, 99])
    assert mirror.num_cached_tokens([*A, *B, 99], keys) == 8
