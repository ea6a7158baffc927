"""People and plans: questions, approval of calls, pauses; also over roll-overs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from temporalio.client import WorkflowFailureError, WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError, CancelledError

from contracts.approval import Verdict
from contracts.llm_step import LLMStepInput, LLMStepResult
from contracts.name import MESSAGE_UPDATE, PAUSE_UPDATE, RESUME_UPDATE
from muster.inbox import People
from muster.job_message import new_message
from tests.plan.acting import TOOLS, echoes, plan, run_plan, start_plan
from tests.workflows.peer import Gate
from tests.workflows.stage import JobHandle, Stage, current_details, progress, within
from tests.workflows.test_approval import decide, pending, refused, waits
from tests.workflows.test_pause import ask, until_doing

SEND = {"ok": {"approval": "Send ${input.what}?", "by": ["ann", "bob"]}}
GIVEN = {"what": "it"}


def paying(policy: Any, **fields: Any) -> Any:
    """A plan whose one call needs approval."""
    tools = [{**TOOLS[0], "approval": policy}, TOOLS[1]]
    return plan({"a": {"tool": "search", "arguments": {"n": 7}, **fields}}, tools=tools)


def answer_of(result: Any) -> Any:
    """Return a plan's output."""
    return json.loads(result.answer)


async def test_question_waits_for_who_may_answer_it(stage: Stage) -> None:
    handle, _ = await start_plan(stage, plan(SEND), GIVEN)
    [asked] = await pending(handle)
    assert (asked.tool, asked.arguments) == ("ok", "question='Send it?'")
    assert asked.call_id == f"{handle.id}/ok/0"
    assert (await progress(handle)).doing == (
        f"waiting for approval of ok(question='Send it?'): muster approve {handle.id}"
    )
    assert "- `ok(question='Send it?')`: 0 of 1 approved" in await current_details(handle)
    assert "'eve' may not decide" in await refused(handle, asked.call_id, by="eve")
    await decide(handle, asked.call_id, by="bob", decision_id="d1")
    result = await within(handle.result())
    assert answer_of(result) == {"ok": {"approved": True, "by": "bob", "reason": ""}}
    assert result.waited_s > 0
    assert (await waits(handle)).pending == ()


async def test_denial_is_an_answer_that_the_plan_goes_on_with(stage: Stage) -> None:
    whole = plan(
        {
            **SEND,
            "go": {"branch": "${ok.approved}", "cases": [{"equals": True, "then": "send"}],
                   "otherwise": "drop"},
            "send": {"tool": "search"},
            "drop": {"llm": "Dropped: ${ok.reason}"},
        }
    )  # fmt: skip
    handle, script = await start_plan(stage, whole, GIVEN)
    [asked] = await pending(handle)
    await decide(handle, asked.call_id, Verdict.DENY, "ann", "Not now.")
    result = await within(handle.result())
    assert answer_of(result) == {"send": None, "drop": "<Dropped: Not now.>"}
    assert script.tool_calls == []


async def test_question_that_nobody_answers_counts_as_denied(stage: Stage) -> None:
    whole = plan({"ok": {"approval": "Send it?", "expires": 0.2}})
    result, _ = await run_plan(stage, whole)
    told = {"approved": False, "by": "", "reason": "nobody has approved it within 0.2 s"}
    assert answer_of(result) == {"ok": told}


async def test_questions_of_a_map_wait_side_by_side_and_are_told_apart(stage: Stage) -> None:
    whole = plan({"each": {"map": ["x", "y", "z"], "do": {"ok": {"approval": "${item}?"}},
                           "gives": "${ok.by}"}})  # fmt: skip
    handle, _ = await start_plan(stage, whole)
    asked = await pending(handle, 3)
    assert [each.tool for each in asked] == ["each[0].ok", "each[1].ok", "each[2].ok"]
    for each, by in zip(asked, ("ann", "bob", "cat"), strict=True):
        await decide(handle, each.call_id, by=by)
    assert answer_of(await within(handle.result())) == {"each": ["ann", "bob", "cat"]}


async def test_call_that_needs_approval_is_made_once_it_has_it(stage: Stage) -> None:
    handle, script = await start_plan(stage, paying("always"))
    [asked] = await pending(handle)
    assert script.tool_calls == []
    await decide(handle, asked.call_id)
    assert answer_of(await within(handle.result())) == {"a": '{"n":7}'}
    assert [call.call.id for call in script.tool_calls] == [asked.call_id]


async def test_call_whose_arguments_need_no_approval_is_made_at_once(stage: Stage) -> None:
    rule = {"when": {"properties": {"n": {"exclusiveMinimum": 100}}, "required": ["n"]}}
    result, script = await run_plan(stage, paying(rule))
    assert len(script.tool_calls) == 1
    assert answer_of(result) == {"a": '{"n":7}'}


async def test_denied_call_fails_its_node(stage: Stage) -> None:
    handle, script = await start_plan(stage, paying("always"))
    [asked] = await pending(handle)
    await decide(handle, asked.call_id, Verdict.DENY, "bob", "Too dear.")
    with pytest.raises(WorkflowFailureError) as caught:
        await within(handle.result())
    assert isinstance(caught.value.cause, ApplicationError)
    assert caught.value.cause.message == (
        "node 'a' failed: search was not called: bob denied it: Too dear."
    )
    assert script.tool_calls == []


async def test_call_that_nobody_approves_in_its_nodes_time_is_denied(stage: Stage) -> None:
    result, script = await run_plan(stage, paying("always", timeout=0.2, on_failure="skip"))
    assert (answer_of(result), script.tool_calls) == ({"a": None}, [])


async def test_questions_are_found_in_everybodys_inbox(stage: Stage) -> None:
    handle, _ = await start_plan(stage, plan(SEND), GIVEN)
    await pending(handle)
    people = People(stage.client)
    meant = await people.find_call(handle.id, None)
    assert meant.tool == "ok"


async def paused(stage: Stage) -> tuple[JobHandle, Any, Gate]:
    """Start a plan of two nodes, and pause it while the first runs."""
    gate = Gate()

    async def model(step: LLMStepInput) -> LLMStepResult:
        first = step.append[-1].content == "x"
        return await (gate.step(echoes) if first else echoes)(step)

    handle, script = await start_plan(
        stage, plan({"a": {"llm": "x"}, "b": {"llm": "${a}"}}), model=model
    )
    await within(gate.reached.wait())
    await ask(handle, PAUSE_UPDATE)
    return handle, script, gate


async def test_paused_plan_ends_what_runs_and_begins_nothing(stage: Stage) -> None:
    handle, script, gate = await paused(stage)
    gate.opened.set()
    await until_doing(handle, f"paused by ann: muster resume {handle.id}")
    assert len(script.steps) == 1
    await ask(handle, RESUME_UPDATE)
    result = await within(handle.result())
    assert answer_of(result) == {"b": "<<x>>"}
    assert result.waited_s > 0


async def test_paused_plan_can_be_cancelled(stage: Stage) -> None:
    handle, _, gate = await paused(stage)
    gate.opened.set()
    await until_doing(handle, "paused")
    await handle.cancel()
    with pytest.raises(WorkflowFailureError) as caught:
        await within(handle.result())
    assert isinstance(caught.value.cause, CancelledError)


async def test_plan_reads_no_messages(stage: Stage) -> None:
    handle, _ = await start_plan(stage, plan(SEND), GIVEN)
    with pytest.raises(WorkflowUpdateFailedError) as caught:
        await handle.execute_update(MESSAGE_UPDATE, new_message("Hello?", None))
    assert isinstance(caught.value.cause, ApplicationError)
    assert caught.value.cause.message == "a plan reads no messages"


async def test_question_and_pause_outlive_roll_overs(rolling_stage: Stage) -> None:
    items = list(range(20))
    whole = plan(
        {
            "ok": {"approval": "Go on?"},
            "each": {"map": items, "width": 2, "do": {
                "one": {"tool": "search", "arguments": {"n": "${item}"}}}},
            "end": {"tool": "read", "arguments": {"ok": "${ok.by}"}},
        },
        output=["${each}", "${end}"],
    )  # fmt: skip
    handle, script = await start_plan(rolling_stage, whole)
    await until_doing(handle, "waiting for approval of ok")
    assert len(await rolling_stage.histories(handle)) > 1
    [asked] = await pending(handle)
    assert asked.call_id == f"{handle.id}/ok/0"
    await ask(handle, PAUSE_UPDATE)
    await decide(handle, asked.call_id, by="ann")
    await until_doing(handle, "paused by ann")
    await ask(handle, RESUME_UPDATE)
    result = await within(handle.result())
    shown = [f'{{"n":{number}}}' for number in items]
    assert answer_of(result) == [shown, '{"ok":"ann"}']
    assert len(script.tool_calls) == 21
    assert result.tool_calls == 21
