"""How long the opening of a job may take: servers have their own time on top, within bounds."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from contracts.job import AgentJobInput
from tests.workflows.stage import MODEL, agent
from workflows import option


def _opening(*list_timeouts: int, left: timedelta = timedelta(hours=1)) -> Any:
    tools = [
        {"mcp": {"url": "http://a.example/mcp", "list_timeout": each}} for each in list_timeouts
    ]
    job = AgentJobInput(agent=agent(*tools), input="Go.", model=MODEL)  # type: ignore[arg-type]
    return option.open_job_options(job, left)


def test_each_server_adds_its_own_time_to_an_attempt() -> None:
    assert _opening()["start_to_close_timeout"] == option.OPEN_JOB_ATTEMPT_TIMEOUT
    longer = _opening(20, 40)["start_to_close_timeout"]
    assert longer == option.OPEN_JOB_ATTEMPT_TIMEOUT + timedelta(seconds=60)


def test_a_plans_servers_have_their_time_too() -> None:
    job = AgentJobInput(agent=agent(), input="Go.", model=MODEL)
    mcp = {"mcp": {"url": "http://a.example/mcp", "list_timeout": 20}}
    opened = agent(mcp)  # type: ignore[arg-type]
    found = option.open_job_options(job, timedelta(hours=1), opened)
    longer = option.OPEN_JOB_ATTEMPT_TIMEOUT + timedelta(seconds=20)
    assert found["start_to_close_timeout"] == longer


def test_no_server_is_waited_for_longer_than_a_job_may_take_to_open() -> None:
    found = _opening(10**7, 10**7)
    assert found["start_to_close_timeout"] == found["schedule_to_close_timeout"]
    assert found["schedule_to_close_timeout"] == option.OPEN_JOB_TIMEOUT
    short = _opening(90, left=timedelta(seconds=40))
    assert short["schedule_to_close_timeout"] == timedelta(seconds=40)
    assert short["start_to_close_timeout"] <= timedelta(seconds=40)
