"""The weather example as a plan, on a whole stack whose engine is simulated."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from contracts.plan import Plan
from examples.weather.launch import running_service
from examples.weather.service import climates, tomorrow
from examples.weather.tools import clothes
from muster.plan_file import load_file
from muster.stack.port import free_port
from tests.acceptance.conftest import Stage, running_stack
from tests.workflows.stage import replay

ROOT = Path(__file__).parents[2]
PLAN = ROOT / "examples" / "weather" / "plan.yaml"
CITIES = ["Brussels", "Tunis", "New York", "Seattle", "Cordoba", "Cambridge"]


@pytest_asyncio.fixture(scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """Return a running stack beside a running weather service."""
    with pytest.MonkeyPatch.context() as patch:
        url = f"http://127.0.0.1:{free_port()}"
        patch.setenv("MUSTER_EXAMPLE_WEATHER_URL", url)
        with running_service():
            async with running_stack(
                tmp_path_factory.mktemp("plan"), MUSTER_EXAMPLE_WEATHER_URL=url
            ) as stage:
                yield stage


def test_example_is_a_plan_whose_tools_are_there() -> None:
    assert isinstance(load_file(PLAN, [ROOT]), Plan)


def check(answer: str) -> None:
    """Check that each city has its own weather, and the clothes for what was read of it."""
    told: list[dict[str, Any]] = json.loads(answer)["each"]
    assert [each["city"] for each in told] == CITIES
    for each in told:
        climate = climates()[each["city"]][tomorrow().month, tomorrow().day]
        said = f"Tomorrow in {each['city']} it will be {climate.high_c} °C and {climate.sky}."
        assert each["weather"] == said
        assert each["wear"] == clothes(each["facts"]["high"], each["facts"]["sky"])


async def test_example_runs_to_its_end(stage: Stage) -> None:
    given = json.dumps({"cities": CITIES})
    done = await asyncio.to_thread(stage.muster.run, "run", str(PLAN), given, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    check(report["answer"])
    assert (report["llm_steps"], report["tool_calls"]) == (6, 12)
    shown = await asyncio.to_thread(stage.muster.run, "show", report["job_id"])
    assert "each  map   done   6 of 6 items" in shown.stdout


async def test_killed_agent_worker_changes_nothing_in_the_result(stage: Stage) -> None:
    given = json.dumps({"cities": CITIES})
    started = await asyncio.to_thread(stage.muster.run, "run", str(PLAN), given, "--detach")
    job_id = started.stdout.strip()
    os.kill(int(stage.muster.part("agents")["pid"]), signal.SIGKILL)
    shown = await asyncio.to_thread(stage.muster.run, "show", job_id, "--wait", "--json")
    report = json.loads(shown.stdout)
    check(report["answer"])
    assert (report["llm_steps"], report["tool_calls"]) == (6, 12)
    assert set((await stage.accepted([job_id])).values()) == {1}
    await replay(await stage.client.get_workflow_handle(job_id).fetch_history())
