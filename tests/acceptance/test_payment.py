"""Case J5: a tool worker killed between a payment and its record pays nothing twice."""

from __future__ import annotations

import pytest

from bench.tool_kill import is_right, measure
from muster.stack.temporal import TemporalPart

KILLS = 5


@pytest.mark.parametrize("seed", [20261207])
async def test_each_payment_is_made_once_though_its_worker_is_killed_again_and_again(
    temporal_server: TemporalPart, database_url: str, seed: int
) -> None:
    """Case J5: the second attempt carries the same key, and the server shows one charge."""
    figures = await measure(temporal_server.address, database_url, KILLS, seed)
    assert is_right(figures), figures
    assert figures["attempts_lost"] > 0, "calls were cut off"
    assert figures["asked_again"] > 0, "calls that were cut off came again, with their keys"
