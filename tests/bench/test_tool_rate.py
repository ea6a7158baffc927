"""A group's rate holds over all its workers, and the figures that are told of it are right."""

from __future__ import annotations

import pytest

from bench.tool_rate import figures, is_right, measure
from muster.stack.temporal import TemporalPart

RATE, SECONDS = 10.0, 0.5
BURST = 3 * RATE
"""What the server hands out at most before it keeps to the rate: one second's calls for each
worker, and some."""


async def test_two_workers_together_are_handed_no_more_than_their_groups_rate(
    temporal_server: TemporalPart, database_url: str
) -> None:
    """Only the upper bound: how fast this machine is decides over the lower one."""
    found = await measure(temporal_server.address, database_url, RATE, SECONDS)
    assert found["jobs_answered"] == found["jobs"] > 1
    assert len(found["of_each_worker"]) == 2, "both workers had a share"
    assert found["calls"] > 2 * BURST
    assert found["whole_s"] >= (found["calls"] - BURST) / RATE, found


def test_the_rate_is_that_of_the_time_after_the_burst() -> None:
    burst = [(0.01 * number, "a") for number in range(20)]
    steady = [(5.0 + number / 4, "b") for number in range(60 * 4)]
    found = figures([*burst, *steady], 60.0)
    assert (found["first_second"], found["per_s"]) == (20, 4.0)
    assert found["per_s_of_each_10_s"] == [4.0] * 6
    assert found["of_each_worker"] == [20, 240]
    jobs = {"jobs": 1, "jobs_answered": 1}
    assert is_right({**found, **jobs, "rate": 4.2})
    assert not is_right({**found, **jobs, "rate": 5.0}), "20% too slow"
    assert not is_right({**found, **jobs, "rate": 4.0, "of_each_worker": [260]})


@pytest.mark.parametrize("name", ["per_s", "of_each_worker", "jobs_answered"])
def test_each_part_of_the_verdict_counts(name: str) -> None:
    right = {"rate": 5.0, "per_s": 5.0, "of_each_worker": [1, 1], "jobs": 2, "jobs_answered": 2}
    assert is_right(right)
    assert not is_right(right | {name: {"per_s": 5.6, "of_each_worker": [2]}.get(name, 1)})
