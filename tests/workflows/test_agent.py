"""An agent job on a real Temporal server: its turns, its tool calls, and what people see of it."""

from __future__ import annotations

import asyncio

from temporalio.client import WorkflowHandle
from temporalio.common import SearchAttributeKey

from contracts.job import AgentJobInput, StopReason
from contracts.llm_step import Hints, Usage
from contracts.message import BlobRef, ContextRef, Message, Role
from contracts.name import SEARCH_STATE, continue_queue, start_queue
from contracts.tool import CallToolInput, CallToolResult
from tests.workflows.peer import (
    STEP_USAGE,
    Gate,
    answered,
    calls,
    raises,
    refuses,
    returns,
    says,
)
from tests.workflows.stage import (
    MODEL,
    Stage,
    agent,
    current_details,
    progress,
    tool,
    within,
)


async def test_message_without_tool_calls_is_the_answer(stage: Stage) -> None:
    result, script = await stage.run(agent(), says("Two apples, five crowns."))
    assert result.answer == "Two apples, five crowns."
    assert result.stop_reason is StopReason.ANSWERED
    assert (result.turns, result.llm_steps, result.tool_calls) == (1, 1, 0)
    assert result.usage == STEP_USAGE
    assert script.openings == 1


async def test_each_step_appends_only_what_is_new(stage: Stage) -> None:
    handle, script = await stage.start(
        agent(tool("search")),
        calls(("search", {"for": "apples"})),
        says("Found."),
        tools={"search": returns("3 left")},
    )
    await within(handle.result())
    first, second = script.steps
    assert first.base == ContextRef(head=f"opening of {handle.id}")
    assert first.append == (Message(role=Role.USER, content="Two apples, please."),)
    assert second.base == ContextRef(head=f"after {first.step_id}", token_run=first.step_id)
    assert second.append == (
        Message(
            role=Role.TOOL,
            content="3 left",
            tool_call_id=f"{first.step_id}/0",
            tool="search",
        ),
    )
    assert [step.toolset for step in script.steps] == ["tools", "tools"]


async def test_a_large_result_goes_to_the_next_step_by_reference(stage: Stage) -> None:
    blob = BlobRef(digest="0" * 64, bytes=4_000_000)

    async def read(call: CallToolInput) -> CallToolResult:
        return answered(call, "The preview.").model_copy(update={"blob": blob})

    _, script = await stage.run(
        agent(tool("read")), calls(("read", {}), ("sing", {})), says("Done."), tools={"read": read}
    )
    told, refused = script.steps[1].append
    assert (told.content, told.blob) == ("The preview.", blob)
    assert refused.blob is None


async def test_only_the_first_step_waits_for_admission(stage: Stage) -> None:
    _, script = await stage.run(
        agent(tool("search")),
        calls(("search", {})),
        calls(("search", {})),
        says("Found."),
        tools={"search": returns("3 left")},
    )
    start, more = start_queue(MODEL), continue_queue(MODEL)
    assert script.step_queues == [start, more, more]


async def test_step_ids_are_job_branch_and_counter(stage: Stage) -> None:
    handle, script = await stage.start(
        agent(tool("search")),
        calls(("search", {})),
        says("Found."),
        tools={"search": returns("3 left")},
    )
    await within(handle.result())
    branch = (handle.first_execution_run_id or "").rpartition("-")[2]
    assert [step.step_id for step in script.steps] == [
        f"{handle.id}/{branch}/1",
        f"{handle.id}/{branch}/2",
    ]


async def test_hints_tell_the_scheduler_priority_tenant_and_attained_service(stage: Stage) -> None:
    spec = agent(tool("search"))
    job = AgentJobInput(agent=spec, input="hi", model=MODEL, tenant="north", priority=2)
    handle, script = await stage.start_input(
        job, calls(("search", {})), says("Found."), tools={"search": returns("3 left")}
    )
    await within(handle.result())
    assert script.steps[0].hints == Hints(priority=2, tenant="north", attained_s=0.0)
    assert script.steps[1].hints == Hints(priority=2, tenant="north", attained_s=0.75)


async def test_tool_calls_run_in_parallel_and_answer_in_the_order_asked(stage: Stage) -> None:
    """Each tool waits until all three run, then until the one asked after it is done."""
    together = asyncio.Barrier(3)
    done = {name: asyncio.Event() for name in ("a", "b", "c")}
    after = {"a": "b", "b": "c"}

    async def tool_body(call: CallToolInput) -> CallToolResult:
        name = call.call.tool
        await together.wait()
        if name in after:
            await done[after[name]].wait()
        done[name].set()
        return answered(call, f"from {name}")

    result, script = await stage.run(
        agent(tool("a"), tool("b"), tool("c"), max_parallel_tool_calls=3),
        calls(("a", {}), ("b", {}), ("c", {})),
        says("Done."),
        tools=dict.fromkeys("abc", tool_body),
    )
    assert [message.content for message in script.steps[1].append] == ["from a", "from b", "from c"]
    assert result.tool_calls == 3


async def test_tool_that_says_no_is_read_by_the_model(stage: Stage) -> None:
    result, script = await stage.run(
        agent(tool("find")),
        calls(("find", {})),
        says("There is no such customer."),
        tools={"find": refuses("error: no such customer")},
    )
    assert result.answer == "There is no such customer."
    assert script.steps[1].append[0].content == "error: no such customer"
    assert len(script.tool_calls) == 1


async def test_tool_that_fails_for_good_is_told_to_the_model(stage: Stage) -> None:
    result, script = await stage.run(
        agent(tool("find")),
        calls(("find", {})),
        says("The till is broken."),
        tools={"find": raises("the till's password has expired")},
    )
    assert result.answer == "The till is broken."
    assert script.steps[1].append[0].content == "error: the till's password has expired"
    assert len(script.tool_calls) == 1


async def test_offer_follows_after_max_calls_and_answer_after(stage: Stage) -> None:
    spec = agent(
        tool("search", max_calls=1),
        tool("read", after=["search"], max_calls=1),
        answer_after=["read"],
    )
    result, script = await stage.run(
        spec,
        calls(("search", {})),
        calls(("read", {})),
        says("It says so."),
        tools={"search": returns("a.txt"), "read": returns("text")},
    )
    assert [(step.output.tools, step.output.may_answer) for step in script.steps] == [
        (("search",), False),
        (("read",), False),
        ((), True),
    ]
    assert result.answer == "It says so."


async def test_progress_says_what_the_job_is_doing(stage: Stage) -> None:
    step, call = Gate(), Gate()
    handle, _ = await stage.start(
        agent(tool("search")),
        step.step(calls(("search", {}))),
        says("Found."),
        tools={"search": call.tool(returns("3 left"))},
    )
    await within(step.reached.wait())
    assert (await progress(handle)).doing == "waiting for LLM step 1"
    step.opened.set()
    await within(call.reached.wait())
    now = await progress(handle)
    assert now.doing == "calling 1 tool: search"
    assert (now.turns, now.llm_steps, now.tool_calls, now.usage) == (1, 1, 1, STEP_USAGE)
    assert "**calling 1 tool: search**" in await current_details(handle)
    call.opened.set()
    await within(handle.result())
    ended = await progress(handle)
    assert (ended.doing, ended.usage) == ("answered", STEP_USAGE + STEP_USAGE)


async def test_state_is_searchable_from_start_to_end(stage: Stage) -> None:
    step = Gate()
    handle, _ = await stage.start(agent(), step.step(says("Done.")))
    await within(step.reached.wait())
    assert await state(handle) == "running"
    step.opened.set()
    await within(handle.result())
    assert await state(handle) == "completed"


async def state(handle: WorkflowHandle[object, object]) -> str | None:
    """Return a job's searchable state."""
    attributes = (await handle.describe()).typed_search_attributes
    return attributes.get(SearchAttributeKey.for_keyword(SEARCH_STATE))


async def test_every_activity_has_a_readable_line(stage: Stage) -> None:
    handle, _ = await stage.start(
        agent(tool("search")),
        calls(("search", {"for": "apples\n" * 500})),
        says("Found."),
        tools={"search": returns("3 left")},
    )
    await within(handle.result())
    lines = [
        event.user_metadata.summary.data.decode()
        for event in (await handle.fetch_history()).events
        if event.HasField("activity_task_scheduled_event_attributes")
    ]
    assert lines[0] == '"open job of agent clerk"'
    assert lines[1] == '"LLM step 1: answer | call search"'
    assert lines[2].startswith('"search(for=')
    assert len(lines[2]) < 200
    assert lines[3] == '"LLM step 2: answer | call search"'


async def test_history_grows_with_what_is_new_only(stage: Stage) -> None:
    """The tenth turn adds no more bytes than the second, though the conversation grows."""
    body = "x" * 20_000
    turns = [calls(("search", {})) for _ in range(10)]
    handle, _ = await stage.start(
        agent(tool("search")), *turns, says("Found."), tools={"search": returns(body)}
    )
    await within(handle.result())
    sizes = [
        event.ByteSize()
        for event in (await handle.fetch_history()).events
        if event.HasField("activity_task_scheduled_event_attributes")
    ]
    steps = sizes[1::2]
    assert max(steps[1:]) - min(steps[1:]) < 200


async def test_usage_is_summed_over_steps(stage: Stage) -> None:
    result, _ = await stage.run(
        agent(tool("search")),
        calls(("search", {})),
        says("Found."),
        tools={"search": returns("3 left")},
    )
    assert result.usage == Usage(prompt_tokens=200, cached_tokens=80, completion_tokens=20)
