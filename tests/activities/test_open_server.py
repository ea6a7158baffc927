"""Opening a job whose tools a server tells: how they are named, and how often it is asked."""

from __future__ import annotations

from typing import Any

import pytest
from temporalio.exceptions import ApplicationError

from activities.open_job import MAX_ATTEMPTS, OpenJob
from activities.toolbox import Toolbox
from contracts.agent import AgentSpec, PinnedTool
from contracts.job import OpenJobInput, OpenJobResult
from muster.stack.port import free_port
from store.context import ContextStore
from store.database import Database
from tests.activities.conftest import environment
from tests.activities.kind.mcp_client import program


async def _open(database: Database, *tools: dict[str, Any], attempt: int = 1) -> OpenJobResult:
    agent = AgentSpec.model_validate({"name": "a", "instructions": "Work.", "tools": tools})
    async with Toolbox() as toolbox:
        return await environment(attempt=attempt).run(
            OpenJob(database, toolbox).open_job, OpenJobInput(job_id="job-1", agent=agent)
        )


async def test_tools_of_a_server_are_pinned_by_their_names_here_and_there(
    database: Database,
) -> None:
    well = program("bad_server", "two pages")
    opened = await _open(
        database,
        {"mcp": well, "name": "shop"},
        {"mcp": well, "remote": "do", "name": "pay"},
        {"mcp": well, "tools": ["do"]},
    )
    assert opened.tools == (
        PinnedTool(name="shop_first", server=0, remote="first"),
        PinnedTool(name="shop_do", server=0, remote="do"),
        PinnedTool(name="do", server=2, remote="do"),
    )
    assert opened.toolset is not None
    told: Any = await ContextStore(database).get_blob(opened.toolset)
    assert [each["name"] for each in told] == ["shop_first", "shop_do", "pay", "do"]


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([("odd name", {})], "'do it!' is no name for a tool"),
        ([("well", {}), ("well too", {})], "2 tools named 'do': mcp '"),
        ([("well", {"tools": ["du"]})], "has no tool 'du'"),
        ([("well", {"name": "x" * 63})], "is no name for a tool"),
    ],
)
async def test_names_that_cannot_be_are_one_clear_error(
    database: Database, tools: list[tuple[str, dict[str, Any]]], said: str
) -> None:
    given = [{"mcp": program("bad_server", way), **more} for way, more in tools]
    with pytest.raises(ApplicationError) as caught:
        await _open(database, *given)
    assert said in caught.value.message
    assert caught.value.non_retryable


async def test_server_that_stays_away_is_asked_a_few_times_and_fails_the_job(
    database: Database,
) -> None:
    away = {"mcp": {"url": f"http://127.0.0.1:{free_port()}/mcp"}}
    with pytest.raises(ApplicationError, match="cannot be reached") as caught:
        await _open(database, away)
    assert not caught.value.non_retryable
    with pytest.raises(ApplicationError, match="gave up after 5 attempts") as caught:
        await _open(database, away, attempt=MAX_ATTEMPTS)
    assert caught.value.non_retryable
