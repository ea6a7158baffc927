"""How much room is left to cold work: none where gaps are short or all fit, some where long."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from inference_service.scheduler.plan import Load, cold_sessions, steps_per_s

LOAD = Load(
    room=10,
    sessions=100,
    gap_s=1.0,
    context_tokens=1_000,
    new_tokens=100,
    output_tokens=50,
    prefill_token_s=0.001,
    decode_base_s=0.016,
    decode_each_s=0.002,
    max_num_seqs=32,
)
LOADS = st.builds(
    Load,
    room=st.floats(1, 60),
    sessions=st.integers(0, 300),
    gap_s=st.floats(0, 1_000),
    context_tokens=st.floats(0, 9_000),
    new_tokens=st.floats(1, 900),
    output_tokens=st.floats(1, 300),
    prefill_token_s=st.floats(1e-5, 1e-2),
    decode_base_s=st.floats(0, 0.1),
    decode_each_s=st.floats(0, 0.01),
    max_num_seqs=st.integers(1, 64),
)


def test_short_gaps_leave_no_room_to_cold_work() -> None:
    assert cold_sessions(replace(LOAD, gap_s=0.1), 0.0) == 0


def test_long_gaps_leave_room_to_cold_work() -> None:
    assert cold_sessions(replace(LOAD, gap_s=300.0), 0.0) > 0


@given(LOADS, st.floats(0, 60))
def test_where_all_fit_all_are_kept(load: Load, now: float) -> None:
    assert cold_sessions(replace(load, sessions=int(load.room)), now) == 0


@given(LOADS)
def test_cold_room_is_a_part_of_the_room(load: Load) -> None:
    assert 0 <= cold_sessions(load, 0.0) <= load.room


@given(LOADS, st.floats(0, 60))
def test_rate_is_none_without_sessions_and_never_negative(load: Load, cold: float) -> None:
    assert steps_per_s(load, cold) >= 0
    assert steps_per_s(replace(load, sessions=0), min(cold, load.room)) == 0


def test_division_is_stable_once_it_is_made() -> None:
    for gap_s in (3.0, 30.0, 300.0):
        load = replace(LOAD, gap_s=gap_s)
        cold = cold_sessions(load, 0.0)
        assert cold_sessions(load, cold) == cold
