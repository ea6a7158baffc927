"""Opening a job pins its conversation and its tools, the same way each time."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from temporalio.exceptions import ApplicationError

from activities import open_job
from activities.open_job import OpenJob
from activities.toolbox import Toolbox
from activities.worker import tool_activities
from contracts.agent import AgentSpec, ToolRef
from contracts.job import OpenJobInput, OpenJobResult
from contracts.message import Message, Role
from store.context import ContextStore
from store.database import Database
from store.schema import job_content
from tests.activities.conftest import BAD, GOOD, environment

DEFINITION = "__temporal_activity_definition"
EXAMPLES = (
    Message(role=Role.USER, content="weather?"),
    Message(role=Role.ASSISTANT, content="sunny"),
)


def _agent(*functions: str) -> AgentSpec:
    return AgentSpec(
        name="helper",
        instructions="You are terse.",
        examples=EXAMPLES,
        tools=tuple(ToolRef(function=function) for function in functions),
    )


async def _open(database: Database, agent: AgentSpec, job_id: str = "job-1") -> OpenJobResult:
    return await environment().run(
        OpenJob(database, Toolbox()).open_job, OpenJobInput(job_id=job_id, agent=agent)
    )


async def test_conversation_opens_with_instructions_and_examples(database: Database) -> None:
    opened = await _open(database, _agent())
    assert opened.toolset is None
    assert opened.context.token_run is None
    messages = await ContextStore(database).load(opened.context.head)
    assert messages == [Message(role=Role.SYSTEM, content="You are terse."), *EXAMPLES]


async def test_toolset_names_the_schemas_of_all_tools_in_order(database: Database) -> None:
    opened = await _open(database, _agent(f"{GOOD}:shout", f"{GOOD}:pay"))
    assert opened.toolset is not None
    schemas: Any = await ContextStore(database).get_blob(opened.toolset)
    assert [schema["name"] for schema in schemas] == ["shout", "pay"]
    assert schemas[0]["description"] == "Return the text in capitals."


async def test_jobs_of_one_agent_share_what_they_pin(database: Database) -> None:
    agent = _agent(f"{GOOD}:shout")
    assert await _open(database, agent) == await _open(database, agent, "job-2")


async def test_tool_that_cannot_be_used_fails_the_opening_for_good(database: Database) -> None:
    with pytest.raises(ApplicationError, match="parameter 'x' has no type hint") as caught:
        await _open(database, _agent(f"{GOOD}:shout", f"{BAD}:no_hint"))
    assert caught.value.non_retryable
    assert caught.value.type == "BadInputError"
    assert "x: str" in caught.value.details[0]


async def test_schemas_that_are_too_large_are_one_clear_error(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_job, "MAX_TOOLSET_BYTES", 100)
    with pytest.raises(ApplicationError) as caught:
        await _open(database, _agent(f"{GOOD}:shout", f"{GOOD}:pay"))
    assert caught.value.non_retryable
    assert "the schemas of the 2 tools of agent 'helper', as JSON," in caught.value.message
    assert "the limit is 100 bytes" in caught.value.message


async def test_what_a_job_opens_with_is_on_record(database: Database) -> None:
    agent = _agent(f"{GOOD}:shout")
    opened = await _open(database, agent)
    assert await _open(database, agent) == opened
    held = await database.fetch(sa.select(job_content))
    assert {(row.job_id, row.kind, row.name) for row in held} == {
        ("job-1", "context", opened.context.head),
        ("job-1", "blob", opened.toolset),
    }


def test_tool_worker_registers_its_activities(database: Database) -> None:
    names = [getattr(found, DEFINITION).name for found in tool_activities(database, Toolbox())]
    assert names == ["open_job", "check_approval", "call_tool", "keep_result"]
