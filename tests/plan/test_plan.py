"""Plans on Temporal: nodes of all kinds, in parallel, with their failures."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from temporalio.client import WorkflowFailureError
from temporalio.exceptions import ApplicationError, CancelledError

from contracts.job import JobStatus, StopReason
from contracts.llm_step import LLMStepInput, LLMStepResult, Usage
from contracts.name import PLAN_STATE_QUERY
from contracts.plan_job import NodeStatus
from muster.job import Jobs
from tests.plan.acting import echoes, look, plan, run_plan, start_plan, tells
from tests.workflows.peer import STEP_USAGE, Gate, Script, Tool, calls, raises, refuses, returns
from tests.workflows.peer import says as agent_says
from tests.workflows.stage import Stage, agent, current_details, progress, tool, within
from workflows.plan_state import BodyState, reset_failed

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def failure_of(error: WorkflowFailureError) -> ApplicationError:
    """Return what a job failed with."""
    assert isinstance(error.cause, ApplicationError)
    return error.cause


async def test_values_go_from_node_to_node(stage: Stage) -> None:
    day = {"type": "object", "properties": {"high": {"type": "integer"}}, "required": ["high"]}
    whole = plan(
        {
            "find": {"tool": "search", "arguments": {"where": "${input.city}"}, "output": {}},
            "read": {"llm": "Read ${find}", "output": day, "instructions": "Be exact."},
            "kind": {"llm": "Is ${read.high} warm?", "choices": ["yes", "no"], "max_tokens": 8},
            "go": {"branch": "${kind}", "cases": [{"equals": "yes", "then": "light"}],
                   "otherwise": "coat"},
            "light": {"llm": "Light for ${input.city}"},
            "coat": {"llm": "Coat for ${input.city}"},
            "wear": {"join": ["light", "coat"], "first": True},
        },
        input=CITY,
        output={"wear": "${wear}", "high": "${read.high}", "note": "in ${input.city}"},
    )  # fmt: skip
    model = tells(
        {
            'Read {"where":"Tunis"}': '{"high":33}',
            "Is 33 warm?": '"yes"',
            "Light for Tunis": "A shirt.",
        }
    )
    result, script = await run_plan(stage, whole, {"city": "Tunis"}, model=model)
    assert result.answer is not None
    assert json.loads(result.answer) == {"wear": "A shirt.", "high": 33, "note": "in Tunis"}
    assert (result.stop_reason, result.llm_steps, result.tool_calls) == (StopReason.ANSWERED, 3, 1)
    assert result.usage == sum([STEP_USAGE] * 3, Usage())
    read, kind, _ = script.steps
    assert read.output.json_schema == day
    assert read.append[0].content == "Be exact."
    assert kind.output.json_schema == {"enum": ["yes", "no"]}
    assert kind.sampling.max_tokens == 8
    assert len({step.step_id for step in script.steps}) == 3
    [call] = script.tool_calls
    assert call.call.id.endswith("/find/0")


async def test_answer_of_a_plan_without_an_output_is_what_no_node_took(stage: Stage) -> None:
    result, _ = await run_plan(stage, plan({"a": {"llm": "x"}, "b": {"llm": "${a}"}}))
    assert result.answer == '{"b":"<<x>>"}'
    result, _ = await run_plan(stage, plan({"a": {"llm": "x"}}, output="${a}"))
    assert result.answer == "<x>"


async def test_what_needs_nothing_of_each_other_runs_at_the_same_time(stage: Stage) -> None:
    gates = [Gate() for _ in range(12)]

    async def stands(step: LLMStepInput) -> LLMStepResult:
        return await gates[int(step.append[-1].content)].step(echoes)(step)

    whole = plan({f"n{number}": {"llm": str(number)} for number in range(12)})
    handle, _ = await start_plan(stage, whole, model=stands)
    await within(asyncio.gather(*(gate.reached.wait() for gate in gates)))
    found = await look(handle)
    assert {node.status for node in found.nodes} == {NodeStatus.RUNNING}
    assert len(found.running) == 12
    assert (await progress(handle)).doing == "running n0, n1, n2, n3, n4 and 7 more"
    details = await current_details(handle)
    assert "| trip | 0 of 12 |" in details
    assert "| n3 | llm | running |" in details
    for gate in gates:
        gate.opened.set()
    await within(handle.result())


async def test_bad_plan_and_bad_input_fail_before_anything_runs(stage: Stage) -> None:
    handle, script = await start_plan(stage, plan({"a": {"llm": "${b}"}}))
    with pytest.raises(WorkflowFailureError) as caught:
        await within(handle.result())
    error = failure_of(caught.value)
    assert error.message == "node 'a', `llm`: ${b}: there is no node 'b'"
    assert error.details[0] == "there are input, a"
    assert (script.openings, script.steps) == (0, [])
    handle, _ = await start_plan(stage, plan({"a": {"llm": "x"}}, input=CITY), {"city": 3})
    with pytest.raises(WorkflowFailureError) as caught:
        await within(handle.result())
    assert failure_of(caught.value).message == (
        "plan 'trip': the input.city is not string but integer"
    )
    report = await Jobs(stage.client).report(handle.id)
    assert (report.status, report.agent) == (JobStatus.FAILED, "trip")


async def test_map_gives_what_its_items_give_in_their_order(stage: Stage) -> None:
    whole = plan(
        {
            "each": {
                "map": "${input.cities}",
                "width": 3,
                "do": {"find": {"tool": "search", "arguments": {"n": "${index}", "x": "${item}"}},
                       "say": {"llm": "${item}: ${find}"}},
                "gives": {"city": "${item}", "said": "${say}"},
            },
            "all": {"llm": "${each[1].said}"},
        },
        input={"type": "object", "properties": {"cities": {"type": "array"}}},
        output=["${each}", "${all}"],
    )  # fmt: skip
    result, script = await run_plan(stage, whole, {"cities": ["Tunis", "Ghent"]})
    assert result.answer is not None
    assert json.loads(result.answer) == [
        [
            {"city": "Tunis", "said": '<Tunis: {"n":0,"x":"Tunis"}>'},
            {"city": "Ghent", "said": '<Ghent: {"n":1,"x":"Ghent"}>'},
        ],
        '<<Ghent: {"n":1,"x":"Ghent"}>>',
    ]
    assert sorted(call.call.id.split("/", 1)[1] for call in script.tool_calls) == [
        "each[0].find/0",
        "each[1].find/0",
    ]


async def test_agent_node_is_a_job_of_its_own_within_the_plans_limits(stage: Stage) -> None:
    finder = agent(tool("look"), name="finder")
    helper = {"name": "helper", "description": "Helps.", "agent": finder}
    whole = plan(
        {"ask": {"agent": "helper", "task": "Find ${input.city}"}, "end": {"llm": "${ask}"}},
        agents=[helper], input=CITY, limits={"max_tokens": 10_000},
    )  # fmt: skip
    script = Script((calls(("look", {})), agent_says("3 euros.")), tools={"look": returns("3")})
    handle, _ = await start_plan(stage, whole, {"city": "Tunis"}, sub_agents={"finder": script})
    result = await within(handle.result())
    assert result.answer == '{"end":"<3 euros.>"}'
    assert script.steps[0].append[-1].content == "Find Tunis"
    assert (result.llm_steps, result.tool_calls) == (3, 2)
    report = await Jobs(stage.client).report(handle.id)
    assert (report.usage, report.llm_steps) == (result.usage, 3)


async def test_failed_node_fails_the_job_and_cancels_the_rest(stage: Stage) -> None:
    gate = Gate()
    whole = plan({"a": {"llm": "x"}, "b": {"tool": "search"}, "c": {"llm": "${b}"}})
    after: dict[str, Tool] = {"search": failing_once(gate, "no shop")}
    handle, script = await start_plan(stage, whole, model=gate.step(echoes), tools=after)
    with pytest.raises(WorkflowFailureError) as caught:
        await within(handle.result())
    error = failure_of(caught.value)
    assert error.message == "node 'b' failed: tool 'search' failed: no shop"
    assert error.details[0] == (
        f"muster retry {handle.id} runs it again; what is done is not done again"
    )
    assert error.details[-1]["llm_steps"] == 1, "the cancelled step has told what it used"
    assert gate.cancelled.is_set()
    assert len(script.steps) == 1
    assert [node.status for node in (await look(handle)).nodes] == [
        NodeStatus.RUNNING,
        NodeStatus.FAILED,
        NodeStatus.WAITING,
    ]


def failing_once(gate: Gate, why: str) -> Tool:
    """A tool that fails for good once the gate is reached."""

    async def fails(call: Any) -> Any:
        await gate.reached.wait()
        return await raises(why)(call)

    return fails


async def test_what_is_done_is_not_done_again_when_a_failed_job_is_retried(stage: Stage) -> None:
    whole = plan(
        {
            "a": {"llm": "first"},
            "each": {"map": ["x", "y", "z"], "width": 1, "do": {
                "one": {"tool": "search", "arguments": {"of": "${a} ${item}"}}}},
            "end": {"llm": "${each}"},
        }
    )  # fmt: skip
    tries: list[str] = []

    async def fails_on_y(call: Any) -> Any:
        tries.append(call.call.arguments["of"])
        if call.call.arguments["of"] == "<first> y" and len(tries) == 2:
            return await raises("no y")(call)
        return await returns(call.call.arguments["of"])(call)

    handle, _ = await start_plan(stage, whole, tools={"search": fails_on_y})
    with pytest.raises(WorkflowFailureError) as caught:
        await within(handle.result())
    assert failure_of(caught.value).message == (
        "node 'each' failed: each[1].one: tool 'search' failed: no y"
    )
    left: BodyState = await handle.query(PLAN_STATE_QUERY, result_type=BodyState)
    reset_failed(left)
    again, script = await start_plan(stage, whole, tools={"search": fails_on_y}, retried=left)
    result = await within(again.result())
    assert result.answer == '{"end":"<[\\"<first> x\\",\\"<first> y\\",\\"<first> z\\"]>"}'
    assert tries == ["<first> x", "<first> y", "<first> y", "<first> z"]
    assert [step.append[-1].content for step in script.steps] == [
        '["<first> x","<first> y","<first> z"]'
    ]


async def test_node_is_tried_again_and_then_its_fallback_runs(skipping_stage: Stage) -> None:
    whole = plan(
        {
            "a": {"tool": "search", "retries": 2, "fallback": "b"},
            "b": {"tool": "read", "arguments": {"n": 1}},
            "end": {"llm": "${a}"},
        }
    )
    result, script = await run_plan(skipping_stage, whole, tools={"search": refuses("error: no")})
    assert result.answer == '{"end":"<{\\"n\\":1}>"}'
    ids = [call.call.id.split("/", 1)[1] for call in script.tool_calls]
    assert ids == ["a/0", "a/1", "a/2", "b/0"]


async def test_tool_result_is_held_against_its_schema(stage: Stage) -> None:
    schema = {"type": "object", "required": ["price"]}
    node = {"tool": "search", "output": schema, "on_failure": "skip"}
    for said, why in (
        ("{}", "what search returned lacks 'price'"),
        ("three", "what search returned is no JSON: expected ident at line 1 column 2"),
    ):
        handle, _ = await start_plan(stage, plan({"a": node}), tools={"search": returns(said)})
        assert (await within(handle.result())).answer == '{"a":null}'
        [seen] = (await look(handle)).nodes
        assert (seen.status, seen.error) == (NodeStatus.SKIPPED, why)


async def test_node_that_takes_too_long_fails(stage: Stage) -> None:
    gate = Gate()
    whole = plan({"a": {"llm": "x", "timeout": 0.3, "fallback": "b"}, "b": {"tool": "read"}})
    handle, _ = await start_plan(stage, whole, model=gate.step(echoes))
    result = await within(handle.result())
    assert result.answer == '{"a":"{}"}'
    assert (await look(handle)).nodes[0].error == "it took longer than its timeout of 0.3 s"


async def test_failed_map_gives_way_to_its_fallback_while_its_items_are_cancelled(
    stage: Stage,
) -> None:
    gate = Gate()
    whole = plan(
        {
            "each": {
                "map": [1, 2], "fallback": "other",
                "do": {"pick": {"branch": "${item}", "cases": [{"equals": 1, "then": "bad"}],
                                "otherwise": "long"},
                       "bad": {"tool": "search"}, "long": {"llm": "x"}},
                "gives": 1,
            },
            "other": {"llm": "other"},
        }
    )  # fmt: skip

    async def model(step: LLMStepInput) -> LLMStepResult:
        slow = step.append[-1].content == "x"
        return await (gate.step(echoes) if slow else echoes)(step)

    tools: dict[str, Tool] = {"search": failing_once(gate, "no")}
    result, _ = await run_plan(stage, whole, model=model, tools=tools)
    assert result.answer == '{"each":"<other>"}'
    assert gate.cancelled.is_set()
    assert result.llm_steps == 2, "what was cancelled is paid for"


async def test_cancelled_job_cancels_what_runs_and_counts_it(stage: Stage) -> None:
    gate = Gate()
    handle, _ = await start_plan(stage, plan({"a": {"llm": "x"}}), model=gate.step(echoes))
    await within(gate.reached.wait())
    await handle.cancel()
    with pytest.raises(WorkflowFailureError) as caught:
        await within(handle.result())
    assert isinstance(caught.value.cause, CancelledError)
    assert gate.cancelled.is_set()
    assert (await progress(handle)).usage == STEP_USAGE


@pytest.mark.parametrize(
    ("limits", "stop"),
    [
        ({"max_llm_steps": 1}, StopReason.MAX_LLM_STEPS),
        ({"max_tokens": 70}, StopReason.MAX_TOKENS),
        ({"max_tool_calls": 0}, StopReason.MAX_TOOL_CALLS),
    ],
)
async def test_limit_stops_the_job_at_the_next_node(
    stage: Stage, limits: dict[str, Any], stop: StopReason
) -> None:
    nodes = {"a": {"llm": "x"}, "b": {"llm": "${a}"}, "c": {"tool": "read", "after": ["a"]}}
    if stop is StopReason.MAX_TOOL_CALLS:
        del nodes["b"]
    handle, script = await start_plan(stage, plan(nodes, limits=limits))
    result = await within(handle.result())
    assert (result.answer, result.stop_reason, len(script.steps)) == (None, stop, 1)
    assert (await Jobs(stage.client).describe(handle.id)).status is JobStatus.STOPPED


async def test_plan_that_takes_too_long_stops(stage: Stage) -> None:
    gate = Gate()
    whole = plan({"a": {"llm": "x"}}, limits={"max_wall_time": 0.4})
    result, _ = await run_plan(stage, whole, model=gate.step(echoes))
    assert result.stop_reason is StopReason.MAX_WALL_TIME


async def test_too_large_a_result_of_a_tool_is_told(stage: Stage) -> None:
    async def large(call: Any) -> Any:
        told = await returns("x")(call)
        return told.model_copy(update={"blob": {"digest": "0" * 64, "bytes": 50_000}})

    handle, _ = await start_plan(stage, plan({"a": {"tool": "search"}}), tools={"search": large})
    with pytest.raises(WorkflowFailureError) as caught:
        await within(handle.result())
    assert failure_of(caught.value).message == (
        "node 'a' failed: what search returned has 50,000 bytes, the limit on a value of a plan "
        "is 16,000 bytes"
    )
