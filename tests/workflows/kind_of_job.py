"""Jobs of each kind, as their histories are recorded and replayed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from pydantic_core import to_json

from contracts.job import JobMessage
from contracts.name import MESSAGE_UPDATE
from tests.plan.acting import plan, start_plan, tells
from tests.workflows.peer import Gate, Reply, Script, Tool, calls, raises, refuses, returns, says
from tests.workflows.stage import JobHandle, Stage, agent, limits, tool
from tests.workflows.test_sub_agent import ASK, helper

DIRECTORY = Path(__file__).parent / "histories"

SEARCH = calls(("search", {}))
SHOP: dict[str, Tool] = {"search": returns("3 left"), "read": refuses("error: no such file")}
SPEC = agent(tool("search"), tool("read", after=["search"]), max_parallel_tool_calls=2)


def long_job() -> Iterator[Reply]:
    """Replies with turns of all kinds: calls made, refused, answered by errors, in parallel."""
    yield calls(("read", {}), ("search", {}))
    yield calls(("search", {}), ("read", {}))
    yield calls(("sing", {}))
    yield says("Done.")


Recording = Callable[[Stage], Awaitable[JobHandle]]


async def all_kinds_of_turns(stage: Stage) -> JobHandle:
    """Calls made, refused, answered by errors, in parallel."""
    handle, _ = await stage.start(SPEC, *long_job(), tools=SHOP)
    return handle


async def rolled_over(stage: Stage) -> JobHandle:
    """More turns than one run holds here."""
    spec = agent(tool("search"), limits=limits(max_turns=30, max_tool_calls=30))
    handle, _ = await stage.start(spec, *[SEARCH] * 9, says("Done."), tools=SHOP)
    return handle


async def sub_agent(stage: Stage) -> JobHandle:
    """A sub-agent that answers."""
    spec = agent(agents=[helper(agent(tool("search"), name="finder"))])
    found = Script((SEARCH, says("3 euros.")), tools={"search": returns("3 euros")})
    handle, _ = await stage.start(spec, ASK, says("It is 3."), sub_agents={"finder": found})
    return handle


async def failed_sub_agent(stage: Stage) -> JobHandle:
    """A sub-agent whose tool fails its job."""
    own = agent(tool("search", on_failure="fail_job"), name="finder")
    lost = Script((SEARCH,), tools={"search": raises("the shelf fell")})
    spec = agent(agents=[helper(own)])
    handle, _ = await stage.start(spec, ASK, says("Sorry."), sub_agents={"finder": lost})
    return handle


async def last_answer(stage: Stage) -> JobHandle:
    """A limit that is reached, and an answer then."""
    spec = agent(tool("search"), limits=limits(max_turns=2))
    handle, _ = await stage.start(spec, SEARCH, SEARCH, says("So far: 3."), tools=SHOP)
    return handle


async def message(stage: Stage) -> JobHandle:
    """One that is read between turns, and one that keeps an answer from ending the job."""
    first, second = Gate(), Gate()
    handle, _ = await stage.start(
        agent(tool("search")),
        first.step(SEARCH),
        second.step(says("3 left.")),
        says("2 of them red."),
        tools=SHOP,
    )
    for gate, text in ((first, "Apples, I mean."), (second, "Red ones?")):
        await gate.reached.wait()
        given = JobMessage(id=text, text=text)
        await handle.execute_update(MESSAGE_UPDATE, given, id=text)
        gate.opened.set()
    return handle


async def plan_of_all_nodes(stage: Stage) -> JobHandle:
    """Each kind of node, a failure with its fallback, and more than one run holds here."""
    finder = {"name": "finder", "description": "Finds.", "agent": agent(name="finder")}
    nodes = {
        "each": {
            "map": ["a", "b", "c"],
            "width": 2,
            "do": {"find": {"tool": "search", "arguments": {"what": "${item}"}}},
        },
        "kind": {"llm": "Is ${each} much?", "choices": ["yes", "no"]},
        "go": {"branch": "${kind}", "cases": [{"equals": "yes", "then": "ask"}]},
        "ask": {"agent": "finder", "task": "Find ${each[0]}"},
        "lost": {"tool": "read", "retries": 1, "fallback": "instead"},
        "instead": {"llm": "Instead."},
        "ok": {"approval": "Go on?", "expires": 0.1},
        "end": {"join": ["ask", "lost", "ok"]},
    }
    found = Script((says("3 euros."),))
    model = tells({f"Is {to_json(['3 left'] * 3).decode()} much?": '"yes"', "Instead.": "So."})
    handle, _ = await start_plan(
        stage, plan(nodes, agents=[finder]), model=model, tools=SHOP, sub_agents={"finder": found}
    )
    return handle


KINDS: dict[str, Recording] = {
    each.__name__: each
    for each in (
        all_kinds_of_turns,
        rolled_over,
        sub_agent,
        failed_sub_agent,
        last_answer,
        message,
        plan_of_all_nodes,
    )
}
