"""Traces become the sessions that they record."""

from __future__ import annotations

from typing import Any

from bench.replay import Scaling, make_copies, read_sessions, simulate
from bench.world.engine import EngineModel
from bench.world.plan import PERSON


def request(size: int, out: int, think: float = 0.0, hashes: range = range(1), **more: Any) -> Any:
    """Return one entry of a trace."""
    entry = {"type": "n", "in": size, "out": out, "think_time": think, "hash_ids": list(hashes)}
    return entry | {"input_types": ["tool_result"]} | more


TRACE = {
    "id": "t",
    "tool_tokens": 300,
    "system_tokens": 100,
    "requests": [
        request(1_000, 100, hashes=range(16)),
        request(1_500, 50, 5.0, range(24)),
        request(1_400, 50, 500.0, range(12), input_types=["text"]),
        request(1_600, 50, 2.0, range(25)),
        {
            "type": "subagent",
            "t": 30.0,
            "agent_id": "a1",
            "subagent_type": "Explore",
            "tool_tokens": 100,
            "system_tokens": 50,
            "requests": [request(400, 20)],
        },
    ],
}


def test_lengths_gaps_and_prefixes_are_the_traces_scaled() -> None:
    plan, helper = read_sessions(TRACE, Scaling(tokens=10, think=5))
    assert plan.shared_tokens == 40
    assert [s.new_tokens for s in plan.steps] == [100, 40, 63, 15]
    assert [s.output_tokens for s in plan.steps] == [10, 5, 5, 5]
    assert [s.keep_tokens for s in plan.steps] == [None, None, 77, None]
    assert [s.gap_s for s in plan.steps] == [1.0, 100.0, 0.4, 0.0]
    assert [s.tool for s in plan.steps] == ["tool", PERSON, "tool", ""]
    assert (helper.arrival_s, helper.final_tokens) == (6.0, 42)


def test_cap_bounds_long_gaps_only() -> None:
    plan, _ = read_sessions(TRACE, Scaling(think=5, cap_s=60))
    assert [step.gap_s for step in plan.steps] == [1.0, 12.0, 0.4, 0.0]


def test_copies_share_their_opening_and_all_end() -> None:
    plans = make_copies(read_sessions(TRACE, Scaling()), copies=3, spread_s=10.0, seed=1)
    assert len({plan.name for plan in plans}) == 6
    assert len({plan.opening for plan in plans}) == 2
    for policy in ("plain", "muster", "bound"):
        assert simulate(plans, policy, EngineModel()).sessions == 6
