"""Decisions that come late, twice, at once, too large or to nobody: each counts once at most."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import uuid4

import pytest
from temporalio.client import WorkflowUpdateFailedError

from contracts.approval import Verdict
from contracts.error import BadInputError, LimitExceededError
from contracts.name import DECIDE_UPDATE
from muster.inbox import People
from muster.job import Jobs
from muster.job_message import new_message
from muster.job_update import new_decision, new_pause
from tests.workflows.peer import Gate, calls, raises, returns, says
from tests.workflows.stage import Stage, agent, tool, within
from tests.workflows.test_approval import PAY, SHOP, decide, pays, pending, refused, shop, waits
from tests.workflows.test_pause import ask
from tests.workflows.test_roll_over import patient


async def test_second_decision_that_differs_changes_nothing(stage: Stage) -> None:
    handle, script = await stage.start(
        shop(max_parallel_tool_calls=2), pays(1, 2), says("Done."), tools=SHOP
    )
    first, second = await pending(handle, 2)
    await decide(handle, first.call_id, Verdict.DENY, "ann", "Too dear.")
    assert "decided already: denied by ann" in await refused(handle, first.call_id, by="ann")
    await decide(handle, second.call_id, Verdict.APPROVE, "ann")
    await within(handle.result())
    assert [each.call.id for each in script.tool_calls] == [second.call_id]


async def test_decision_after_the_expiry_is_refused_while_the_turn_goes_on(stage: Stage) -> None:
    gate = Gate()
    spec = shop({"expires": timedelta(seconds=1)}, max_parallel_tool_calls=2)
    both = calls(("pay", {"amount": 5}), ("look", {}))
    tools = {**SHOP, "look": gate.tool(returns("3 left"))}
    handle, script = await stage.start(spec, both, says("Late."), tools=tools)
    [call] = await pending(handle)
    await pending(handle, 0)
    assert "was not decided in time" in await refused(handle, call.call_id)
    assert "was not decided in time" in await refused(handle, call.call_id, verdict=Verdict.DENY)
    gate.opened.set()
    await within(handle.result())
    assert [each.call.tool for each in script.tool_calls] == ["look"]


async def test_reason_of_a_megabyte_is_refused_once_and_the_job_goes_on(stage: Stage) -> None:
    handle, script = await stage.start(shop(), PAY, says("Done."), tools=SHOP)
    [call] = await pending(handle)
    with pytest.raises(LimitExceededError, match="the reason has 1,000,000 characters"):
        new_decision(call.call_id, Verdict.DENY, by="ann", reason="x" * 1_000_000)
    raw = {"id": "a", "call_id": call.call_id, "verdict": "deny", "by": "ann"}
    with pytest.raises(WorkflowUpdateFailedError) as caught:
        await within(handle.execute_update(DECIDE_UPDATE, {**raw, "reason": "x" * 1_000_000}))
    assert len(str(caught.value.cause)) < 2_000
    size = sum(event.ByteSize() for event in (await handle.fetch_history()).events)
    assert size < 100_000, "what is refused is no part of the history"
    await decide(handle, call.call_id)
    assert (await within(handle.result())).answer == "Done."
    assert len(script.tool_calls) == 1


async def test_one_person_at_once_from_two_clients_is_one_of_two(stage: Stage) -> None:
    handle, script = await stage.start(shop({"people": 2}), PAY, says("Done."), tools=SHOP)
    [call] = await pending(handle)
    both = [decide(handle, call.call_id, by="ann") for _ in range(2)]
    ended = await asyncio.gather(*both, return_exceptions=True)
    assert sorted(type(each).__name__ for each in ended) == [
        "NoneType",
        "WorkflowUpdateFailedError",
    ]
    [call] = await pending(handle)
    assert call.approved_by == ("ann",)
    assert script.tool_calls == []
    await decide(handle, call.call_id, by="bob")
    await within(handle.result())


async def test_as_many_decisions_at_once_as_calls_all_arrive(stage: Stage) -> None:
    """More than the server lets be in flight at a time: the rest is sent again."""
    handle, script = await stage.start(
        shop(max_parallel_tool_calls=32), pays(*range(32)), says("Done."), tools=SHOP
    )
    asked, people = await pending(handle, 32), People(stage.client)
    given = [new_decision(call.call_id, Verdict.APPROVE, by="ann") for call in asked]
    await within(asyncio.gather(*(people.decide(handle.id, each) for each in given)))
    await within(handle.result())
    assert len(script.tool_calls) == 32


async def test_decision_and_cancellation_at_once_end_the_job_cancelled_or_decided(
    stage: Stage,
) -> None:
    handle, script = await stage.start(shop(), PAY, says("Done."), tools=SHOP)
    [call] = await pending(handle)
    given = new_decision(call.call_id, Verdict.APPROVE, by="ann")
    sent = asyncio.create_task(People(stage.client).decide(handle.id, given))
    await handle.cancel()
    ended = await asyncio.gather(sent, return_exceptions=True)
    assert ended[0] is None or isinstance(ended[0], BadInputError)
    await within(Jobs(stage.client).wait(handle.id))
    assert (await waits(handle)).pending == ()
    assert len(script.tool_calls) <= 1


async def test_everything_to_a_closed_job_is_refused_with_its_state(stage: Stage) -> None:
    handle, _ = await stage.start(agent(), says("Done."))
    await within(handle.result())
    people, jobs = People(stage.client), Jobs(stage.client)
    sent = [
        people.decide(handle.id, new_decision("a", Verdict.APPROVE, by="ann")),
        people.pause(handle.id, new_pause(by="ann")),
        people.resume(handle.id, new_pause(by="ann")),
        jobs.send(handle.id, new_message("More.", None)),
    ]
    for each in await within(asyncio.gather(*sent, return_exceptions=True)):
        assert isinstance(each, BadInputError)
        assert "completed" in each.message
        assert each.hint == f"muster show {handle.id}"


async def test_decisions_during_roll_overs_and_lost_workers_count_once(
    rolling_stage: Stage,
) -> None:
    """Three people decide on three calls while the worker is away and the job rolls over."""
    spec = agent(tool("pay", approval={"people": 3}), max_parallel_tool_calls=3, limits=patient())
    handle, script = await rolling_stage.start(spec, pays(1, 2, 3), says("Done."), tools=SHOP)
    asked, people = await pending(handle, 3), People(rolling_stage.client)
    jobs = Jobs(rolling_stage.client)
    await rolling_stage.stop_agent_worker()
    sent = [
        asyncio.create_task(
            people.decide(handle.id, new_decision(call.call_id, Verdict.APPROVE, by=by))
        )
        for call in asked
        for by in ("ann", "bob")
    ]
    await rolling_stage.start_agent_worker(max_cached_workflows=0)
    await within(asyncio.gather(*sent))
    runs = len(await rolling_stage.histories(handle))
    last = [
        asyncio.create_task(
            people.decide(handle.id, new_decision(call.call_id, Verdict.APPROVE, by="eve"))
        )
        for call in asked[:2]
    ]
    while len(await rolling_stage.histories(handle)) == runs:
        await jobs.send(handle.id, new_message("More.", None))
    await within(asyncio.gather(*last))
    [call] = await pending(handle)
    assert sorted(call.approved_by) == ["ann", "bob"]
    await people.decide(handle.id, new_decision(call.call_id, Verdict.DENY, by="eve"))
    await within(handle.result())
    assert sorted(each.call.id for each in script.tool_calls) == sorted(
        each.call_id for each in asked[:2]
    )


async def test_call_that_fails_the_job_ends_those_that_wait(stage: Stage) -> None:
    """No call waits for people of a job that is over; what they decide then is refused."""
    gate = Gate()
    spec = agent(
        tool("pay", approval="always"),
        tool("look", on_failure="fail_job"),
        max_parallel_tool_calls=2,
    )
    both = calls(("pay", {"amount": 5}), ("look", {}))
    tools = {**SHOP, "look": gate.tool(raises("broken"))}
    handle, script = await stage.start(spec, both, tools=tools)
    [call] = await pending(handle)
    gate.opened.set()
    await within(Jobs(stage.client).wait(handle.id))
    assert (await waits(handle)).pending == ()
    with pytest.raises(BadInputError, match="has ended: failed"):
        await People(stage.client).decide(
            handle.id, new_decision(call.call_id, Verdict.APPROVE, by="ann")
        )
    assert [each.call.tool for each in script.tool_calls] == ["look"]


async def test_pause_and_resumption_at_once_leave_one_of_both(stage: Stage) -> None:
    handle, script = await stage.start(shop(), PAY, says("Done."), tools=SHOP)
    [call] = await pending(handle)
    for _ in range(5):
        both = [ask(handle, update) for update in ("pause", "resume", "pause", "resume")]
        await asyncio.gather(*both, return_exceptions=True)
    if (await waits(handle)).paused:
        await ask(handle, "resume", uuid4().hex)
    assert (await waits(handle)).paused is None
    await decide(handle, call.call_id)
    await within(handle.result())
    assert len(script.tool_calls) == 1
