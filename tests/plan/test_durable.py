"""Plans outlive their workers, roll over, and grow large; every history replays."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from contracts.llm_step import LLMStepInput, LLMStepResult
from contracts.plan import Plan
from contracts.tool import CallToolInput, CallToolResult
from tests.plan.acting import echoes, plan, run_plan, start_plan
from tests.plan.dag import hash_of, play, random_plan
from tests.plan.test_progress import nested
from tests.workflows.peer import Gate, answered, refuses
from tests.workflows.stage import Stage, within


async def does(call: CallToolInput) -> CallToolResult:
    """Do what `dag.play` does with a node's call, in its JSON."""
    given = call.call.arguments
    if given.get("fails"):
        return await refuses("error: it was told to")(call)
    name = call.call.id.split("/")[1].rpartition(".")[2]
    return answered(call, json.dumps([name, hash_of(given)]))


def on_temporal(whole: Plan) -> Plan:
    """Return a random plan with its tool's results read as JSON, which `play` has as they are."""
    data = whole.model_dump(mode="json")

    def reads_json(nodes: dict[str, Any]) -> None:
        for node in nodes.values():
            if "tool" in node:
                node["output"] = {}
            if "do" in node:
                reads_json(node["do"])

    reads_json(data["nodes"])
    return Plan.model_validate(data)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_random_plan_ends_as_the_pure_one_though_its_worker_is_replaced(
    stage: Stage, seed: int
) -> None:
    whole = random_plan(random.Random(seed), 30)
    expected = play(whole, random.Random(seed))
    gate = Gate()
    number = 0

    async def tool(call: CallToolInput) -> CallToolResult:
        nonlocal number
        number += 1
        if number == 10:
            await gate.stand()
        return await does(call)

    handle, script = await start_plan(stage, on_temporal(whole), tools={"t": tool})
    await within(gate.reached.wait())
    await stage.stop_agent_worker()
    gate.opened.set()
    await stage.start_agent_worker(max_cached_workflows=0)
    result = await within(handle.result())
    assert json.loads(result.answer or "") == expected.output
    ran = Counter(call.call.id.split("/")[1] for call in script.tool_calls)
    assert set(ran.values()) == {1}, "each node once"
    assert set(ran) == set(expected.begun)


async def test_plan_that_rolls_over_ends_as_one_that_does_not(
    rolling_stage: Stage,
) -> None:
    whole = random_plan(random.Random(7), 60)
    expected = play(whole, random.Random(7))
    handle, script = await start_plan(rolling_stage, on_temporal(whole), tools={"t": does})
    result = await within(handle.result())
    assert json.loads(result.answer or "") == expected.output
    assert len(await rolling_stage.histories(handle)) > 1
    assert len(script.tool_calls) == sum(expected.begun.values()) == result.tool_calls
    assert script.openings == 1


async def test_steps_of_all_runs_are_counted_and_have_ids_of_their_own(
    rolling_stage: Stage,
) -> None:
    nodes: dict[str, Any] = {"n0": {"llm": "x"}}
    for number in range(1, 20):
        nodes[f"n{number}"] = {"llm": f"${{n{number - 1}}}"}
    handle, script = await start_plan(rolling_stage, plan(nodes))
    result = await within(handle.result())
    assert json.loads(result.answer or "") == {"n19": "<" * 20 + "x" + ">" * 20}
    assert len(await rolling_stage.histories(handle)) > 1
    assert result.llm_steps == len({step.step_id for step in script.steps}) == 20


async def test_map_of_500_nodes_over_4_levels_completes(stage: Stage) -> None:
    whole = plan({**nested([5, 5, 5, 4])}, max_parallel=64)
    data = whole.model_dump(mode="json")
    data["nodes"] = json.loads(json.dumps(data["nodes"]).replace('"tool": "t"', '"tool": "read"'))
    handle, script = await start_plan(stage, Plan.model_validate(data))
    result = await asyncio.wait_for(handle.result(), 100)
    [outer] = json.loads(result.answer or "").values()
    assert [[[len(three) for three in two] for two in one] for one in outer] == [[[4] * 5] * 5] * 5
    assert outer[0][1][2][3] == '{"of":[3,3]}'
    assert len({call.call.id for call in script.tool_calls}) == result.tool_calls == 500
    [history] = await stage.histories(handle)
    assert len(history.events) < 10_000


async def test_failed_map_cancels_calls_that_are_in_flight(stage: Stage) -> None:
    gate = Gate()

    async def tool(call: CallToolInput) -> CallToolResult:
        if call.call.arguments["n"] == 1:
            return await gate.tool(does)(call)
        await gate.reached.wait()
        return await refuses("error: no")(call)

    one = {"tool": "search", "arguments": {"n": "${item}"}, "timeout": 60}
    each = {"map": [1, 2], "on_failure": "skip", "do": {"one": one}}
    whole = plan({"each": each, "end": {"join": ["each"]}})
    result, _ = await run_plan(stage, whole, tools={"search": tool})
    assert result.answer == '{"end":{"each":null}}'


async def test_node_that_runs_when_its_worker_goes_is_not_begun_again(stage: Stage) -> None:
    gate = Gate()

    async def model(step: LLMStepInput) -> LLMStepResult:
        return await gate.step(echoes)(step)

    handle, script = await start_plan(
        stage, plan({"a": {"llm": "x"}, "b": {"llm": "y ${a}"}}), model=model
    )
    await within(gate.reached.wait())
    await stage.stop_agent_worker()
    gate.opened.set()
    await stage.start_agent_worker()
    assert (await within(handle.result())).answer == '{"b":"<y <x>>"}'
    assert prompts(script.steps) == ["x", "y <x>"]


def prompts(steps: Sequence[LLMStepInput]) -> list[str]:
    """Return what the model was asked."""
    return [step.append[-1].content for step in steps]
