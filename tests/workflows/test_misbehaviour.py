"""What models do that they should not: the job goes on, with a valid list of messages."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import JsonValue

from contracts.agent import AgentSpec
from contracts.message import Role
from tests.workflows.peer import Script, Tool, calls, returns, says
from tests.workflows.stage import Stage, agent, tool

Call = tuple[str, dict[str, JsonValue]]

SHOP: dict[str, Tool] = {"search": returns("3 left"), "read": returns("text")}


async def answers(stage: Stage, spec: AgentSpec, *asked: Call, **more: Any) -> Script:
    """Run a job whose first message asks for these calls and whose second answers."""
    result, script = await stage.run(
        spec, calls(*asked, **more), says("Sorry, I am done."), tools=SHOP
    )
    assert result.answer == "Sorry, I am done."
    messages = script.steps[1].append
    assert [message.role for message in messages] == [Role.TOOL] * len(asked)
    assert [message.tool for message in messages] == [name for name, _ in asked]
    return script


def texts(script: Script) -> list[str]:
    """Return what the model read after its calls."""
    return [message.content for message in script.steps[1].append]


def made(script: Script) -> list[str]:
    """Return the tools that were really called."""
    return [call.call.tool for call in script.tool_calls]


async def test_unknown_tool_is_answered_with_the_tools_there_are(stage: Stage) -> None:
    script = await answers(stage, agent(tool("search")), ("sing", {}))
    assert texts(script) == [
        "error: there is no tool 'sing'; the tools that may be called are: search"
    ]
    assert made(script) == []


async def test_tool_called_before_its_time_is_answered_with_what_must_come_first(
    stage: Stage,
) -> None:
    spec = agent(tool("search"), tool("read", after=["search"]), max_parallel_tool_calls=2)
    script = await answers(stage, spec, ("read", {}), ("search", {}))
    assert texts(script) == [
        "error: read may be called only after search; the tools that may be called are: search",
        "3 left",
    ]
    assert made(script) == ["search"]


async def test_tool_called_too_often_is_answered_with_its_limit(stage: Stage) -> None:
    spec = agent(tool("search", max_calls=1), max_parallel_tool_calls=4)
    script = await answers(stage, spec, ("search", {}), ("search", {}))
    assert texts(script)[0] == "3 left"
    assert texts(script)[1].startswith("error: search may be called at most 1 times")
    assert made(script) == ["search"]


async def test_more_calls_than_allowed_at_once_are_answered_unmade(stage: Stage) -> None:
    spec = agent(tool("search"), max_parallel_tool_calls=2)
    script = await answers(stage, spec, ("search", {}), ("search", {}), ("search", {}))
    assert texts(script)[:2] == ["3 left", "3 left"]
    assert "one message may call at most 2 tools at once" in texts(script)[2]
    assert made(script) == ["search", "search"]


async def test_answer_given_too_early_is_sent_back(stage: Stage) -> None:
    spec = agent(tool("search"), answer_after=["search"])
    result, script = await stage.run(
        spec, says("I guess 3."), calls(("search", {})), says("3 left."), tools=SHOP
    )
    assert result.answer == "3 left."
    assert result.turns == 3
    (message,) = script.steps[1].append
    assert message.role is Role.USER
    assert message.content == "Do not answer yet: the tools that may be called are: search."


async def test_call_id_used_twice_is_called_once(stage: Stage) -> None:
    spec = agent(tool("search"), max_parallel_tool_calls=2)
    script = await answers(stage, spec, ("search", {}), ("search", {}), ids=["one", "one"])
    assert texts(script) == ["3 left", "error: the call id 'one' is used twice"]
    assert made(script) == ["search"]


async def test_calls_of_an_agent_without_tools_are_answered(stage: Stage) -> None:
    script = await answers(stage, agent(), ("search", {}))
    assert texts(script) == ["error: there is no tool 'search'; answer now, without calling a tool"]


@pytest.mark.parametrize("name", ["", "a\x00b\nc", "x" * 5_000, "поиск🍎" * 50])
async def test_strange_tool_names_reach_no_limit_of_temporal(stage: Stage, name: str) -> None:
    script = await answers(stage, agent(tool("search")), (name, {"q": '\\"\x07🍎' * 300}))
    assert texts(script)[0].startswith("error: there is no tool ")
    assert len(texts(script)[0]) < 300


async def test_strange_arguments_reach_no_limit_of_temporal(stage: Stage) -> None:
    arguments: dict[str, JsonValue] = {'🍎"\\' * 60: ["🍎" * 1_000] * 10, "\x07": "🍎" * 100_000}
    script = await answers(stage, agent(tool("search")), ("search", arguments))
    assert texts(script) == ["3 left"]
    assert script.tool_calls[0].call.arguments == arguments


async def test_results_that_are_too_large_together_are_left_out_by_size(stage: Stage) -> None:
    tools: dict[str, Tool] = {"small": returns("s"), "large": returns("é\n" * 400_000)}
    spec = agent(tool("small"), tool("large"), max_parallel_tool_calls=3)
    result, script = await stage.run(
        spec, calls(("large", {}), ("small", {}), ("large", {})), says("Too much."), tools=tools
    )
    assert result.answer == "Too much."
    first, second, third = (message.content for message in script.steps[1].append)
    assert first.startswith("error: the result has 1,600,")
    assert second == "s"
    assert third.startswith("error: the result has 1,600,")
