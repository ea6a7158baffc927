"""Calls wait for people: each decision reaches its call, once, over roll-overs and lost workers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from pydantic import JsonValue
from temporalio.client import WorkflowFailureError, WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError, CancelledError

from contracts.agent import AgentSpec, SubAgent
from contracts.approval import ApprovalMode, Decision, JobWaits, PendingApproval, Verdict
from contracts.job import StopReason
from contracts.llm_step import SessionHint, SessionState
from contracts.name import DECIDE_UPDATE, WAITS_QUERY
from muster.job import Jobs
from muster.job_message import new_message
from muster.job_update import new_decision
from tests.workflows.peer import Gate, Reply, Script, answered, calls, returns, says
from tests.workflows.stage import (
    JobHandle,
    Stage,
    agent,
    current_details,
    limits,
    progress,
    tool,
    within,
)
from tests.workflows.test_roll_over import patient, say

SHOP = {"pay": returns("paid"), "look": returns("3 left")}
PAY = calls(("pay", {"amount": 5}))
BIG = {"properties": {"amount": {"exclusiveMinimum": 100}}, "required": ["amount"]}


def shop(approval: Any = "always", **fields: Any) -> AgentSpec:
    """An agent whose `pay` needs approval."""
    return agent(tool("pay", approval=approval), tool("look"), **fields)


def pays(*amounts: int) -> Reply:
    """Reply with payments, side by side."""
    asked: list[tuple[str, dict[str, JsonValue]]] = [("pay", {"amount": n}) for n in amounts]
    return calls(*asked)


async def waits(handle: JobHandle) -> JobWaits:
    """Ask a job what it waits for."""
    answer: JobWaits = await handle.query(WAITS_QUERY, result_type=JobWaits)
    return answer


async def pending(handle: JobHandle, number: int = 1) -> Sequence[PendingApproval]:
    """Wait until so many calls of a job wait for approval."""
    async with asyncio.timeout(30):
        while len(found := (await waits(handle)).pending) != number:
            await asyncio.sleep(0.02)
    return found


async def decide(
    handle: JobHandle,
    call_id: str,
    verdict: Verdict = Verdict.APPROVE,
    by: str = "ann",
    reason: str = "",
    decision_id: str | None = None,
) -> None:
    """Send a decision to the workflow itself, which tells apart what Temporal does not."""
    given = Decision(
        id=decision_id or uuid4().hex, call_id=call_id, verdict=verdict, by=by, reason=reason
    )
    await handle.execute_update(DECIDE_UPDATE, given, id=uuid4().hex)


async def refused(handle: JobHandle, call_id: str, **given: Any) -> str:
    """Send a decision that must be refused; return why."""
    with pytest.raises(WorkflowUpdateFailedError) as caught:
        await decide(handle, call_id, **given)
    assert isinstance(caught.value.cause, ApplicationError)
    return str(caught.value.cause.message)


async def test_call_is_made_only_after_it_is_approved(stage: Stage) -> None:
    handle, script = await stage.start(shop(), PAY, says("Done."), tools=SHOP)
    [call] = await pending(handle)
    assert (call.tool, call.arguments, call.people, call.by) == ("pay", "amount=5", 1, ())
    assert script.tool_calls == []
    told = await current_details(handle)
    assert "- `pay(amount=5)`: 0 of 1 approved; anyone may decide; asked " in told
    assert call.call_id in told
    assert f"muster approve {handle.id}" in (await progress(handle)).doing
    await decide(handle, call.call_id)
    result = await within(handle.result())
    assert (result.answer, result.tool_calls) == ("Done.", 1)
    assert [each.call.id for each in script.tool_calls] == [call.call_id]
    assert result.waited_s > 0


async def test_denial_is_final_and_the_model_reads_its_reason(stage: Stage) -> None:
    spec = shop({"people": 2})
    handle, script = await stage.start(spec, PAY, says("Sorry."), tools=SHOP)
    [call] = await pending(handle)
    await decide(handle, call.call_id, by="ann")
    await decide(handle, call.call_id, Verdict.DENY, "bob", "Too dear.")
    result = await within(handle.result())
    assert result.answer == "Sorry."
    assert script.tool_calls == []
    assert [m.content for m in script.steps[1].append] == [
        "error: pay was not called: bob denied it: Too dear."
    ]


async def test_calls_that_need_none_run_while_others_wait(stage: Stage) -> None:
    spec = shop({"when": BIG}, max_parallel_tool_calls=3)
    three = calls(("pay", {"amount": 500}), ("pay", {"amount": 100}), ("look", {}))
    handle, script = await stage.start(spec, three, says("Done."), tools=SHOP)
    [call] = await pending(handle)
    assert call.arguments == "amount=500"
    async with asyncio.timeout(30):
        while len(script.tool_calls) < 2:
            await asyncio.sleep(0.02)
    assert {each.call.tool for each in script.tool_calls} == {"pay", "look"}
    await decide(handle, call.call_id)
    await within(handle.result())
    assert [m.content for m in script.steps[1].append] == ["paid", "paid", "3 left"]


async def test_rule_that_cannot_be_tried_leaves_the_call_to_people(stage: Stage) -> None:
    rule = {"properties": {"amount": {"$ref": "#/nowhere"}}}
    handle, script = await stage.start(shop({"when": rule}), PAY, says("Done."), tools=SHOP)
    [call] = await pending(handle)
    assert call.note.startswith("its rule could not be checked: tool 'pay'")
    assert script.tool_calls == []
    await decide(handle, call.call_id)
    await within(handle.result())


@pytest.mark.parametrize("cached", [1_000, 0])
async def test_decisions_in_reverse_order_and_twice_reach_their_calls_once(
    rolling_stage: Stage, cached: int
) -> None:
    """Case J7: three calls at once, over roll-overs and a lost worker; without a cache, too."""
    paid: list[object] = []

    async def pay(call: Any) -> Any:
        paid.append(call.call.arguments["amount"])
        return answered(call, f"paid {call.call.arguments['amount']}")

    spec = agent(
        tool("look"), tool("pay", approval="always"), max_parallel_tool_calls=3, limits=patient()
    )
    replies = [*[calls(("look", {}))] * 3, pays(1, 2, 3), says("Done.")]
    handle, script = await rolling_stage.start(spec, *replies, tools={**SHOP, "pay": pay})
    asked = await pending(handle, 3)
    runs = len(await rolling_stage.histories(handle))
    while len(await rolling_stage.histories(handle)) == runs:  # messages make the history grow
        await Jobs(rolling_stage.client).send(handle.id, new_message("More.", None))
    assert [each.asked_at for each in await pending(handle, 3)] == [e.asked_at for e in asked]
    first, second, third = (each.call_id for each in asked)
    await decide(handle, third, decision_id="c")
    await rolling_stage.stop_agent_worker()
    await rolling_stage.start_agent_worker(max_cached_workflows=cached)
    await decide(handle, third, decision_id="c")
    assert "is decided already: approved by ann" in await refused(handle, third, by="bob")
    await decide(handle, second, Verdict.DENY, reason="No.")
    await pending(handle, 1)
    runs = len(await rolling_stage.histories(handle))
    while len(await rolling_stage.histories(handle)) == runs:
        await Jobs(rolling_stage.client).send(handle.id, new_message("More.", None))
    await decide(handle, third, decision_id="c")
    await decide(handle, first)
    result = await within(handle.result())
    assert result.answer == "Done."
    assert sorted(map(str, paid)) == ["1", "3"]
    read = [m.content for m in script.steps[4].append if m.tool == "pay"]
    assert read == ["paid 1", "error: pay was not called: ann denied it: No.", "paid 3"]


async def test_two_clients_at_once_approve_a_call_once(stage: Stage) -> None:
    handle, script = await stage.start(shop(), PAY, says("Done."), tools=SHOP)
    [call] = await pending(handle)
    both = [decide(handle, call.call_id, by=name) for name in ("ann", "bob")]
    ended = await asyncio.gather(*both, return_exceptions=True)
    assert sum(each is None for each in ended) >= 1
    await within(handle.result())
    assert len(script.tool_calls) == 1


async def test_several_must_approve_who_may_and_each_counts_once(stage: Stage) -> None:
    spec = shop({"people": 2, "by": ["ann", "bob", "eve"]})
    handle, script = await stage.start(spec, PAY, says("Done."), tools=SHOP)
    [call] = await pending(handle)
    assert "'mallory' may not decide" in await refused(handle, call.call_id, by="mallory")
    assert "no call 'x' waits for approval" in await refused(handle, "x")
    await decide(handle, call.call_id, by="ann")
    assert "'ann' has approved" in await refused(handle, call.call_id, by="ann")
    [call] = await pending(handle)
    assert call.approved_by == ("ann",)
    assert script.tool_calls == []
    await decide(handle, call.call_id, by="eve")
    await within(handle.result())
    assert len(script.tool_calls) == 1


async def test_call_that_nobody_decides_in_time_is_denied(stage: Stage) -> None:
    spec = shop({"expires": timedelta(seconds=1)})
    handle, script = await stage.start(spec, PAY, says("Nobody was there."), tools=SHOP)
    result = await within(handle.result())
    assert result.answer == "Nobody was there."
    assert script.tool_calls == []
    assert [m.content for m in script.steps[1].append] == [
        "error: pay was not called: nobody has approved it within 1 s"
    ]


async def test_expiry_holds_over_a_roll_over(rolling_stage: Stage) -> None:
    spec = shop({"expires": timedelta(seconds=3)}, limits=patient())
    handle, script = await rolling_stage.start(spec, PAY, says("Late."), tools=SHOP)
    [call] = await pending(handle)
    while len(await rolling_stage.histories(handle)) == 1:
        await Jobs(rolling_stage.client).send(handle.id, new_message("More.", None))
    if found := (await waits(handle)).pending:
        assert found[0].expires_at == call.expires_at
    await within(handle.result())
    assert script.steps[1].append[0].content.endswith("nobody has approved it within 3 s")


async def test_cancellation_ends_a_job_that_waits(stage: Stage) -> None:
    handle, script = await stage.start(shop(), PAY, tools=SHOP)
    [call] = await pending(handle)
    await handle.cancel()
    with pytest.raises(WorkflowFailureError) as caught:
        await within(handle.result())
    assert isinstance(caught.value.cause, CancelledError)
    assert script.tool_calls == []
    assert (await waits(handle)).pending == ()
    with pytest.raises(Exception, match="completed"):
        await decide(handle, call.call_id)


async def test_wall_time_ends_a_job_that_waits_with_a_last_answer(stage: Stage) -> None:
    spec = shop(limits=limits(max_wall_time=timedelta(seconds=2)))
    handle, script = await stage.start(spec, PAY, says("So far."), tools=SHOP)
    result = await within(handle.result())
    assert (result.answer, result.stop_reason) == ("So far.", StopReason.MAX_WALL_TIME)
    assert script.tool_calls == []


async def test_message_to_a_job_that_waits_is_read_after_the_decision(stage: Stage) -> None:
    handle, script = await stage.start(shop(), PAY, says("Done."), tools=SHOP)
    [call] = await pending(handle)
    await say(handle, "Hurry.")
    await decide(handle, call.call_id)
    await within(handle.result())
    assert [m.content for m in script.steps[1].append] == ["paid", "Hurry."]


async def test_as_many_calls_wait_as_one_message_may_ask_for(stage: Stage) -> None:
    spec = shop(max_parallel_tool_calls=32)
    handle, script = await stage.start(spec, pays(*range(32)), says("Done."), tools=SHOP)
    asked = await pending(handle, 32)
    for call in reversed(asked):
        await decide(handle, call.call_id)
    await within(handle.result())
    assert len(script.tool_calls) == 32


async def test_sub_agent_itself_waits_and_so_do_its_calls(stage: Stage) -> None:
    helper = SubAgent(name="buyer", description="Buys.", agent=shop(), approval=ApprovalMode.ALWAYS)
    spec = AgentSpec(name="boss", instructions="Delegate.", agents=(helper,))
    ask = calls(("buyer", {"task": "Buy."}))
    handle, script = await stage.start(
        spec,
        ask,
        says("Bought."),
        sub_agents={"clerk": Script([PAY, says("Yes.")], tools=dict(SHOP))},
    )
    [call] = await pending(handle)
    assert call.tool == "buyer"
    assert len(stage.peer.scripts) == 1
    await decide(handle, call.call_id)
    child = await _child(stage, handle)
    [inner] = await pending(child)
    assert inner.tool == "pay"
    assert (await waits(handle)).pending == ()
    await decide(child, inner.call_id)
    result = await within(handle.result())
    assert (result.answer, result.tool_calls) == ("Bought.", 2)
    assert len(script.sub_agents["clerk"].tool_calls) == 1


async def _child(stage: Stage, handle: JobHandle) -> JobHandle:
    async with asyncio.timeout(30):
        while len(stage.peer.scripts) == 1:
            await asyncio.sleep(0.02)
    [name] = [name for name in stage.peer.scripts if name != handle.id]
    child: JobHandle = stage.client.get_workflow_handle(name)
    return child


async def test_service_is_told_once_only_people_are_waited_for(stage: Stage) -> None:
    gate = Gate()
    spec = shop(max_parallel_tool_calls=2)
    tools = {**SHOP, "look": gate.tool(returns("3 left"))}
    both = calls(("pay", {"amount": 5}), ("look", {}))
    handle, script = await stage.start(spec, both, says("Done."), tools=tools)
    await within(gate.reached.wait())
    [call] = await pending(handle)
    assert script.hints == []
    gate.opened.set()
    async with asyncio.timeout(30):
        while not script.hints:
            await asyncio.sleep(0.02)
    await decide(handle, call.call_id)
    await within(handle.result())
    assert script.hints == [SessionHint(job_id=handle.id, state=SessionState.WAITING)]


async def test_job_that_waits_holds_no_activity(stage: Stage) -> None:
    handle, script = await stage.start(shop(), PAY, says("Done."), tools=SHOP)
    [call] = await pending(handle)
    async with asyncio.timeout(30):
        while not script.hints or (await handle.describe()).raw_description.pending_activities:
            await asyncio.sleep(0.02)
    await decide(handle, call.call_id)
    await within(handle.result())


@pytest.mark.parametrize("given", [{"by": "two words"}, {"id": ""}, {"reason": "x" * 501}])
async def test_decision_that_is_none_is_refused_and_the_job_goes_on(
    stage: Stage, given: dict[str, str]
) -> None:
    handle, _ = await stage.start(shop(), PAY, says("Done."), tools=SHOP)
    [call] = await pending(handle)
    raw = {"id": "a", "call_id": call.call_id, "verdict": "approve", "by": "ann", **given}
    with pytest.raises(WorkflowUpdateFailedError):
        await within(handle.execute_update(DECIDE_UPDATE, raw))
    await decide(handle, call.call_id)
    assert (await within(handle.result())).answer == "Done."


def test_decisions_have_ids_of_their_own() -> None:
    one, other = (new_decision("c", Verdict.APPROVE, by="ann") for _ in range(2))
    assert one.id != other.id
