"""The benchmark of histories counts turns and their bytes as it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from temporalio.api.history.v1 import HistoryEvent

from bench.history import at_10_and_90, growth, opening_text, turn_bytes
from contracts.name import LLM_STEP


def event(name: str = "", weight: int = 0) -> HistoryEvent:
    """Return an event that schedules an activity, or another, of some size."""
    made = HistoryEvent(event_id=1)
    if name:
        made.activity_task_scheduled_event_attributes.activity_type.name = name
    made.worker_may_ignore = False
    made.user_metadata.summary.data = b"x" * weight
    return made


def test_a_turn_reaches_from_one_step_to_the_next_and_the_last_is_not_whole() -> None:
    step, rest = event(LLM_STEP, 10), event("call_tool", 500)
    turns = turn_bytes([event(weight=9_000), step, rest, step, step, rest])
    assert turns == [step.ByteSize() + rest.ByteSize(), step.ByteSize()]


def test_the_ratio_is_that_of_late_turns_to_early_ones() -> None:
    figures = at_10_and_90([100] * 50 + [150] * 50)
    assert figures["bytes_per_turn_ratio"] == pytest.approx(1.5)
    assert at_10_and_90([100] * 10) == {}


def test_memory_is_told_at_the_turns_that_were_reached() -> None:
    held = [(0, 90.0), (60, 95.0), (130, 99.0), (400, 97.0)]
    figures = growth(held)
    assert (figures["before"], figures["turn_100"], figures["after"]) == (90.0, 99.0, 97.0)
    assert "turn_1000" not in figures


def test_the_opening_has_its_size_in_bytes_and_is_the_same_each_time() -> None:
    assert len(opening_text(2_000)) == 9_000
    assert opening_text(2_000) == opening_text(2_000)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_long_conversation_stays_small_in_history_and_turns_stay_flat(tmp_path: Path) -> None:
    """Case J1: 100 turns of a 5 kB tool call on 200,000 tokens, without any author's code."""
    program = [sys.executable, "-m", "bench.history", "--json", str(tmp_path / "figures.json")]
    options = ["--calls", "100", "--tool-kb", "5", "--context-tokens", "200000"]
    subprocess.run([*program, *options], check=True, stdout=subprocess.DEVNULL)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["completed"], figures["failure"]
    assert figures["turns"] == 100
    assert figures["history_mb"] < 10
    assert figures["bytes_per_turn_ratio"] <= 1.1
