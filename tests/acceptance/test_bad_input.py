"""Bad input of every kind of tool: each is one clear error, told once."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import ApplicationError

from activities.call_tool import CallTool
from activities.toolbox import Toolbox
from contracts.agent import AgentSpec, Sampling, ToolRef
from contracts.message import ToolCall
from contracts.tool import CallToolInput, ToolOutcome
from store.database import Database
from tests.acceptance.calling import Handle, asks, calling, says
from tests.acceptance.test_large import LONG
from tests.activities.conftest import GOOD, environment

DEADLINE_S = 60.0
FUNCTION = {"function": f"{GOOD}:pay"}
DATABASE = {
    "sql": {"url": "sqlite:////nowhere/shop.db", "description": "The shop."},
    "name": "shop",
}


def remote(arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return an activity as an agent file names it; nobody serves its queue."""
    activity = {"type": "book", "queue": "nobody", "description": "Book.", "arguments": arguments}
    return {"activity": activity, **more}


def takes(**properties: Any) -> dict[str, Any]:
    """Return a schema of arguments."""
    return {"type": "object", "properties": properties}


def agent(*tools: dict[str, Any], **fields: Any) -> AgentSpec:
    return AgentSpec.model_validate(
        {"name": "clerk", "instructions": "Serve.", "tools": tools, **fields}
    )


async def failure(handle: Handle) -> ApplicationError:
    """Return what a job failed with."""
    with pytest.raises(WorkflowFailureError) as caught:
        await handle.result()
    cause: BaseException | None = caught.value.cause
    while cause is not None and not isinstance(cause, ApplicationError):
        cause = cause.__cause__
    assert cause is not None
    return cause


async def attempts(handle: Handle) -> list[int]:
    """Return of each activity of a job at which attempt it ended."""
    return [
        event.activity_task_started_event_attributes.attempt
        for event in (await handle.fetch_history()).events
        if event.HasField("activity_task_started_event_attributes")
    ]


LOOP = takes(x={"$ref": "#/$defs/a"}) | {"$defs": {"a": {"$ref": "#/$defs/a"}}}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        pytest.param({"type": "objekt"}, "'objekt' is not valid", id="no-schema"),
        pytest.param({"type": "string"}, "its type is 'string', not 'object'", id="no-object"),
        pytest.param(takes(x={"minimum": "much"}), "'much' is not of type 'number'", id="inside"),
        pytest.param({"type": "object", "$ref": "#"}, "leads back to itself", id="loop-at-root"),
        pytest.param(LOOP, "leads back to itself", id="loop-inside"),
        pytest.param(takes(x={"$ref": "#/$defs/b"}), "'#/$defs/b' leads nowhere", id="nowhere"),
        pytest.param(takes(x={"$ref": "http://127.0.0.1:9/x"}), "leads out of it", id="elsewhere"),
    ],
)
async def test_schema_that_is_none_fails_the_job_once_when_it_opens(
    temporal_client: Client, database: Database, schema: dict[str, Any], said: str
) -> None:
    async with (
        calling(temporal_client, database, lambda *_: says("Never.")) as jobs,
        asyncio.timeout(DEADLINE_S),
    ):
        handle = await jobs.start(agent(remote(schema)))
        error = await failure(handle)
        assert error.type == "BadInputError"
        assert "tool 'book'" in error.message
        assert said in error.message
        assert error.details[0], "it has a hint"
        assert await attempts(handle) == [1]


@pytest.mark.parametrize(
    "tools",
    [
        pytest.param((FUNCTION, {"function": "other:pay"}), id="functions"),
        pytest.param((FUNCTION, {**DATABASE, "name": "pay"}), id="function-and-database"),
        pytest.param((remote(takes(), name="pay"), FUNCTION), id="activity-and-function"),
    ],
)
def test_names_that_collide_are_refused_with_the_agent(tools: tuple[dict[str, Any], ...]) -> None:
    with pytest.raises(ValueError, match="two tools are named 'pay'; give one of them another"):
        agent(*tools)


@pytest.mark.parametrize(
    ("tool", "name", "arguments", "said"),
    [
        pytest.param(FUNCTION, "pay", {"amount": "much"}, "amount", id="function"),
        pytest.param(DATABASE, "shop", {"sql": 7}, "sql", id="database"),
        pytest.param(remote(takes(n={"type": "integer"})), "book", {"n": "x"}, "n", id="activity"),
    ],
)
async def test_arguments_of_the_wrong_type_are_one_error_and_nothing_is_called(
    temporal_client: Client,
    database: Database,
    tool: dict[str, Any],
    name: str,
    arguments: dict[str, Any],
    said: str,
) -> None:
    """An engine that keeps to schemas cannot ask so; one that does not fails its step."""
    async with (
        calling(temporal_client, database, lambda *_: asks((name, arguments))) as jobs,
        asyncio.timeout(DEADLINE_S),
    ):
        handle = await jobs.start(agent(tool, max_parallel_tool_calls=2))
        error = await failure(handle)
        assert f"breaks its schema at $.calls[0].arguments.{said}: " in error.message
        assert len(error.message) < 1_000
        assert await jobs.ledger(handle.id) == []


async def test_arguments_without_an_end_are_one_error_that_says_what_to_raise(
    temporal_client: Client, database: Database
) -> None:
    """Cut at `max_tokens`; a megabyte that fits there is in `inference_service/test_large.py`."""
    asked = asks(("shout", {"text": "x" * 1_000_000}))
    spec = agent(
        {"function": f"{GOOD}:shout"},
        max_parallel_tool_calls=2,
        sampling=Sampling(max_tokens=32_768),
    )
    async with (
        calling(temporal_client, database, lambda *_: asked, config=LONG) as jobs,
        asyncio.timeout(DEADLINE_S),
    ):
        handle = await jobs.start(spec)
        error = await failure(handle)
        assert "the model's output is not JSON" in error.message
        assert error.details[0] == "raise `sampling.max_tokens`, so that the object is not cut off"
        assert len(error.message) < 1_000
        assert await attempts(handle) == [1, 3]
        assert await jobs.ledger(handle.id) == []


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_statement_of_a_megabyte_is_one_short_error_to_the_model(
    database: Database, database_url: str, tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "shop.db"
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("create table fruit (name text)")
    url = f"sqlite:///{file}" if kind == "sqlite" else database_url
    tool = ToolRef.model_validate({"sql": {"url": url, "description": "The shop."}})
    statement = f"select {'x' * 1_000_000} from fruit"
    call = ToolCall(id="job-1/b/1/0", tool="sql", arguments={"sql": statement})
    request = CallToolInput(job_id="job-1", call=call, tool=tool)
    async with Toolbox() as toolbox:
        result = await environment().run(CallTool(database, toolbox).call_tool, request)
    assert result.outcome is ToolOutcome.ERROR
    assert result.content.startswith("error: StatementError: ")
    assert len(result.content) < 5_000
