"""What a report says of real jobs on the simulated engine: was it tools, the GPU, or the host?"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from temporalio.client import Client

from contracts.agent import AgentSpec, ToolRef
from inference_service.engine.simulated import SimulatedConfig
from muster.advice import Bound
from muster.job import Jobs
from muster.time_report import JobTimes, job_times
from store.database import Database
from tests.acceptance.calling import asks, calling, says
from tests.cli.past_job import check_times

DEADLINE_S = 60.0
AT_ONCE = SimulatedConfig(time_scale=0.0)
"""An engine whose own work takes no time."""


async def reports(
    client: Client,
    database: Database,
    agent: AgentSpec,
    replies: list[dict[str, Any]],
    *,
    config: SimulatedConfig,
    jobs: int = 1,
) -> list[JobTimes]:
    """Run jobs side by side, whose model gives the `replies`; return their reports."""

    def model(number: int, prompt: str) -> dict[str, Any]:
        return replies[number - 1]

    async with (
        calling(client, database, model, config=config) as stage,
        asyncio.timeout(DEADLINE_S),
    ):
        handles = [await stage.start(agent) for _ in range(jobs)]
        for handle in handles:
            await handle.result()
        found = [job_times(await Jobs(client).report(handle.id), 1.0) for handle in handles]
    for times in found:
        check_times(times)
        assert times.account.split.total_s == pytest.approx(times.account.wall_s, rel=0.01)
    return found


async def test_job_whose_tool_takes_most_of_its_time_is_tool_bound(
    temporal_client: Client, database: Database
) -> None:
    tool = ToolRef(function="tests.acceptance.tool.slow:wait")
    agent = AgentSpec(name="waiter", instructions="Wait.", tools=(tool,), max_parallel_tool_calls=2)
    replies = [asks(("wait", {"seconds": 4.0})), says("Done.")]
    [times] = await reports(temporal_client, database, agent, replies, config=AT_ONCE)
    assert times.advice.bound is Bound.TOOLS, times
    [called] = times.account.tools
    assert called.waited_s >= called.inside_s >= 4.0


async def test_jobs_of_a_starved_engine_are_gpu_bound(
    temporal_client: Client, database: Database
) -> None:
    one_seat = SimulatedConfig(max_num_seqs=1)
    agent = AgentSpec(name="writer", instructions="Write.")
    replies = [says("word " * 100)]
    found = await reports(temporal_client, database, agent, replies, config=one_seat, jobs=5)
    last = max(found, key=lambda times: times.account.wall_s)
    assert last.advice.bound is Bound.GPU, last
    assert "waiting for the engine" in last.advice.text
    waited_s = last.account.split.backlog_s + last.account.split.line_s
    assert waited_s > last.account.split.decode_s


async def test_job_whose_host_work_takes_most_of_its_time_is_host_bound(
    temporal_client: Client, database: Database
) -> None:
    long = AgentSpec(name="reader", instructions="Read all of this. " * 1_500)
    [times] = await reports(temporal_client, database, long, [says("Read.")], config=AT_ONCE)
    assert times.advice.bound is Bound.HOST, times
    assert times.account.split.host_pre_s > 0
