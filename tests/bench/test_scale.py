"""The scale bench measures what it says, at a small size."""

from __future__ import annotations

from bench.scale import MESSAGES, cost, memory, replicas


def test_as_many_events_are_timed_as_were_wanted() -> None:
    figures = cost("sessions:20", sessions=30, events=500)
    assert 500 <= figures["events"] < 600
    assert 0 < figures["p50_us"] <= figures["p99_us"] <= figures["max_us"]


def test_memory_grows_with_the_sessions_that_are_known() -> None:
    assert memory("plain", 10)["messages"] == MESSAGES


def test_replicas_run_every_session_once() -> None:
    one, four = replicas("plain", 64, 1), replicas("plain", 64, 4)
    assert one["sessions"] == four["sessions"] == 64
    assert four["prefix_hit"] > one["prefix_hit"]
