"""Rules of the pure parts, held for whatever a model may do."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import to_json

from contracts.agent import AgentSpec, Limits, ToolRef
from contracts.job import JobMessage, StopReason
from contracts.limit import (
    INLINE_RESULT_BYTES,
    MAX_AGENT_BYTES,
    MAX_ASSISTANT_BYTES,
    MAX_INBOX_BYTES,
    MAX_TOOLS,
)
from contracts.llm_step import OutputForm, Usage
from contracts.message import ContextRef, Message, Role, ToolCall
from contracts.tool import ToolOutcome
from workflows.limit import reached, reserved_time, spent_tokens
from workflows.offer import NothingOfferedError, calls_left, held_back_by, offer
from workflows.state import MAX_SEEN_MESSAGES, AgentRunInput, JobState, OpenCall, ToolTally
from workflows.text import MAX_SUMMARY_BYTES, call_summary, one_line, step_summary, summary
from workflows.turn import fit, plan_calls, shrink, tool_messages

START = datetime(2026, 1, 1, tzinfo=UTC)
NAMES = ("a", "b", "c", "d")

names = st.sampled_from(NAMES)


@st.composite
def agents(draw: st.DrawFn) -> AgentSpec:
    """Agents of up to four tools that wait for one another, in circles too."""
    known = draw(st.lists(names, unique=True, max_size=4))
    some = st.lists(st.sampled_from(known), unique=True, max_size=2) if known else st.just([])
    tools = [
        ToolRef(
            function=f"shop:{name}",
            after=tuple(other for other in draw(some) if other != name),
            max_calls=draw(st.none() | st.integers(1, 3)),
        )
        for name in known
    ]
    return AgentSpec(
        name="clerk",
        instructions="Serve.",
        tools=tuple(tools),
        answer_after=tuple(draw(some)),
        max_parallel_tool_calls=draw(st.integers(1, 4)),
        limits=Limits(max_tool_calls=draw(st.integers(0, 6))),
    )


@st.composite
def states(draw: st.DrawFn) -> JobState:
    """States in which each tool has been called and has answered some times."""
    tools: dict[str, ToolTally] = {}
    for name in draw(st.lists(names, unique=True)):
        made = draw(st.integers(0, 3))
        tools[name] = ToolTally(calls=made, answers=draw(st.integers(0, made)))
    return JobState(
        branch="b",
        deadline=START,
        tools=tools,
        tool_calls=sum(tally.calls for tally in tools.values()),
    )


tool_calls = st.builds(
    ToolCall,
    id=st.sampled_from([str(number) for number in range(9)]),
    tool=names | st.just("sing"),
    arguments=st.just({}),
)


def offered(agent: AgentSpec, state: JobState) -> OutputForm | None:
    """Return what is offered, or None if nothing is."""
    try:
        return offer(agent, state)
    except NothingOfferedError:
        return None


@given(agents(), states())
def test_offer_holds_exactly_the_tools_whose_time_has_come(
    agent: AgentSpec, state: JobState
) -> None:
    form = offered(agent, state)
    ready = [
        tool.tool_name
        for tool in agent.tools
        if all(state.tally(name).answers for name in tool.after)
        and (tool.max_calls is None or state.tally(tool.tool_name).calls < tool.max_calls)
    ]
    may_answer = all(state.tally(name).answers for name in agent.answer_after)
    if form is None:
        assert (ready, may_answer) == ([], False)
    else:
        assert (list(form.tools), form.may_answer) == (ready, may_answer)
        assert form.tools or form.may_answer
        assert 1 <= form.max_calls <= agent.max_parallel_tool_calls


@given(agents(), states())
def test_nothing_offered_names_every_tool_that_is_waited_for(
    agent: AgentSpec, state: JobState
) -> None:
    if offered(agent, state) is None:
        with pytest.raises(NothingOfferedError) as caught:
            offer(agent, state)
        assert all(name in caught.value.message for name in held_back_by(agent.answer_after, state))
        assert caught.value.hint


@given(agents(), states(), st.lists(tool_calls, max_size=8))
def test_each_call_is_planned_once_in_order_and_only_what_is_offered_is_made(
    agent: AgentSpec, state: JobState, calls: list[ToolCall]
) -> None:
    form = offered(agent, state)
    if form is None:
        return
    plan = plan_calls(calls, form, agent, state)
    assert [item.call for item in plan] == calls
    made = [item for item in plan if item.answer is None]
    assert len(made) <= agent.max_parallel_tool_calls
    assert len({item.call.id for item in made}) == len(made)
    for tool, count in Counter(item.call.tool for item in made).items():
        assert tool in form.tools
        left = calls_left(next(ref for ref in agent.tools if ref.tool_name == tool), state)
        assert left is None or count <= left
    assert all(item.answer.startswith("error: ") for item in plan if item.answer is not None)


@given(agents(), states(), tool_calls)
def test_a_single_call_of_an_offered_tool_is_always_made(
    agent: AgentSpec, state: JobState, call: ToolCall
) -> None:
    form = offered(agent, state)
    if form is not None and call.tool in form.tools:
        assert plan_calls([call], form, agent, state)[0].answer is None


@given(agents(), st.data())
def test_a_job_of_limited_tools_always_comes_to_an_end(
    agent: AgentSpec, data: st.DataObject
) -> None:
    """Whatever is called and however it goes, the tools are spent after a bounded time."""
    tools = tuple(
        tool.model_copy(update={"max_calls": tool.max_calls or 2}) for tool in agent.tools
    )
    agent = agent.model_copy(update={"tools": tools})
    state = JobState(branch="b", deadline=START)
    for _ in range(1 + sum(tool.max_calls or 0 for tool in tools)):
        form = offered(agent, state)
        if form is None or not form.tools:
            return
        name = data.draw(st.sampled_from(form.tools))
        state.count_call(name)
        state.count_answer(name, data.draw(st.sampled_from(ToolOutcome)), "content")
        state = JobState.model_validate_json(state.model_dump_json())
    raise AssertionError("tools are still offered")


@given(states())
def test_state_survives_a_roll_over(state: JobState) -> None:
    assert JobState.model_validate_json(state.model_dump_json()) == state


def test_no_step_id_is_given_out_twice() -> None:
    state = JobState(branch="b", deadline=START)
    assert [state.take_step_id("job") for _ in range(3)] == ["job/b/1", "job/b/2", "job/b/3"]


contents = st.text(max_size=200) | st.text(min_size=1, max_size=1).map(lambda char: char * 2_000)


@given(st.lists(contents, min_size=1, max_size=8), st.integers(400, 4_000))
def test_messages_are_cut_down_from_the_largest_until_they_fit(
    texts: list[str], limit: int
) -> None:
    calls = [ToolCall(id=str(n), tool="a", arguments={}) for n in range(len(texts))]
    pairs = zip(calls, texts, strict=True)
    messages = tool_messages([OpenCall(call=call, answer=text) for call, text in pairs])
    fitting = fit(messages, limit)
    assert [message.tool_call_id for message in fitting] == [call.id for call in calls]
    size = sum(len(to_json(message)) for message in fitting)
    changed = [place for place, message in enumerate(messages) if fitting[place] != message]
    if sum(len(to_json(message)) for message in messages) <= limit:
        assert changed == []
    else:
        assert size <= limit or len(changed) == len(messages)
        smallest = min(len(to_json(messages[place])) for place in changed)
        kept = [m for place, m in enumerate(messages) if place not in changed]
        assert all(len(to_json(message)) <= smallest for message in kept)


def test_all_results_of_a_full_turn_fit_when_each_is_small() -> None:
    message = Message(role=Role.TOOL, content="x" * 40_000, tool_call_id="1", tool="a")
    assert fit([message] * 32) == [message] * 32


any_text = st.text(max_size=400) | st.text(alphabet='🍎"\\é\n', min_size=100, max_size=300)


@given(any_text)
def test_summary_is_one_line_that_the_server_accepts(text: str) -> None:
    line = summary(text)
    assert line == "" or line.isprintable()
    for ascii_only in (True, False):
        assert len(json.dumps(line, ensure_ascii=ascii_only).encode()) <= MAX_SUMMARY_BYTES


@given(any_text, st.integers(1, 80))
def test_one_line_keeps_short_text_and_marks_what_is_cut(text: str, max_chars: int) -> None:
    line = one_line(text, max_chars)
    assert len(line) <= max_chars
    words = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    assert line == words or line.endswith("…")


@given(any_text, st.dictionaries(any_text, st.none() | st.integers() | any_text, max_size=4))
def test_summaries_of_calls_and_steps_fit(
    name: str, arguments: dict[str, int | str | None]
) -> None:
    call = ToolCall.model_validate({"id": "1", "tool": name, "arguments": arguments})
    form = OutputForm(tools=(name,) * 64)
    for line in (call_summary(call), step_summary(7, form)):
        assert len(json.dumps(line).encode()) <= MAX_SUMMARY_BYTES


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100), st.integers(0, 100))
def test_waste_and_cached_tokens_do_not_count_against_the_limit(
    uncached: int, cached: int, generated: int, wasted: int
) -> None:
    usage = Usage(
        prompt_tokens=uncached + cached,
        cached_tokens=cached,
        completion_tokens=generated,
        wasted_tokens=wasted,
    )
    assert spent_tokens(usage) == uncached + generated


@pytest.mark.parametrize(
    ("turns", "tokens", "steps", "engine_s", "stop"),
    [
        (2, 99, 3, 0.9, None),
        (3, 99, 3, 0.9, StopReason.MAX_TURNS),
        (2, 100, 3, 0.9, StopReason.MAX_TOKENS),
        (2, 99, 4, 0.9, StopReason.MAX_LLM_STEPS),
        (2, 99, 3, 1.0, StopReason.MAX_ENGINE_TIME),
    ],
)
def test_limit_is_reached_at_its_value_and_not_before(
    turns: int, tokens: int, steps: int, engine_s: float, stop: StopReason | None
) -> None:
    state = JobState(
        branch="b",
        deadline=START,
        turns=turns,
        usage=Usage(completion_tokens=tokens),
        llm_steps=steps,
        attained_s=engine_s,
    )
    limits = Limits(
        max_turns=3, max_tokens=100, max_llm_steps=4, max_engine_time=timedelta(seconds=1)
    )
    assert reached(limits, state) is stop


@given(st.timedeltas(min_value=timedelta(seconds=1), max_value=timedelta(days=10)))
def test_time_is_kept_back_for_the_last_answer_and_most_is_not(wall_time: timedelta) -> None:
    limits = Limits(max_wall_time=wall_time)
    assert timedelta(0) < reserved_time(limits) <= min(timedelta(seconds=30), wall_time / 9)
    assert reserved_time(limits.model_copy(update={"last_answer_tokens": 0})) == timedelta(0)


def full_job(answers: list[str | None], arguments: list[int]) -> tuple[AgentSpec, JobState]:
    """A job at the limit of all that it remembers, its calls of so many bytes of arguments."""
    agent = AgentSpec(name="clerk", instructions="x" * (MAX_AGENT_BYTES - 2_000))
    state = JobState(branch="b" * 12, deadline=START)
    for number in range(MAX_TOOLS):
        state.count_call(f"tool_{number}")
        state.count_answer(f"tool_{number}", ToolOutcome.ERROR, "\x01" * 5_000)
    for number in range(MAX_SEEN_MESSAGES):
        state.receive(JobMessage(id=f"{number:064}", text="."))
    state.inbox = [JobMessage(id="m", text="x" * (MAX_INBOX_BYTES - 2))]
    state.calls = [
        OpenCall(
            call=ToolCall(id=f"{n:0200}", tool="tool_0", arguments={"text": "x" * size}),
            answer=answer,
        )
        for n, (answer, size) in enumerate(zip(answers, arguments, strict=True))
    ]
    return agent, state


def handed_on(agent: AgentSpec, state: JobState) -> int:
    """Return the bytes of what the next run would start with."""
    return len(to_json(AgentRunInput(agent=agent, input="…", model="m", carried=state)))


@pytest.mark.parametrize("done", [0, 16, 31, 32])
def test_what_tools_return_and_what_is_still_to_be_made_is_handed_on_whole(done: int) -> None:
    """All calls of a message at its limit, of a job that is full, however many have answered."""
    inline = "x" * (INLINE_RESULT_BYTES - 2)
    answers = [inline if n < done else None for n in range(32)]
    agent, state = full_job(answers, [(MAX_ASSISTANT_BYTES - 10_000) // 32] * 32)
    before = [each.model_copy() for each in state.calls]
    shrink(agent, state)
    assert [each.answer for each in state.calls] == answers
    assert all(
        each.call.arguments == ({} if each.answer else old.call.arguments)
        for each, old in zip(state.calls, before, strict=True)
    )
    assert handed_on(agent, state) < 2 << 20


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.none() | st.integers(0, 700_000), st.integers(0, 700_000)),
        min_size=1,
        max_size=32,
    )
)
def test_whatever_a_run_hands_on_fits_and_every_call_stays(calls: list[tuple[Any, int]]) -> None:
    answers = [None if answer is None else "\n" * answer for answer, _ in calls]
    agent, state = full_job(answers, [size for _, size in calls])
    ids = [each.call.id for each in state.calls]
    shrink(agent, state)
    assert handed_on(agent, state) < 2 << 20
    assert [each.call.id for each in state.calls] == ids
    assert all(
        each.answer is not None
        for each, answer in zip(state.calls, answers, strict=True)
        if answer is not None
    )


@given(st.lists(contents.map(lambda text: text * 200), min_size=1, max_size=32))
def test_answers_that_wait_for_the_next_step_fit_too(texts: list[str]) -> None:
    agent, state = full_job([], [])
    calls = [ToolCall(id=str(n), tool="a", arguments={}) for n in range(len(texts))]
    pairs = zip(calls, texts, strict=True)
    state.pending = tool_messages([OpenCall(call=call, answer=text) for call, text in pairs])
    shrink(agent, state)
    assert handed_on(agent, state) < 2 << 20
    assert [message.tool_call_id for message in state.pending] == [call.id for call in calls]


@given(st.lists(st.text(min_size=1, max_size=50), max_size=12), st.integers(1, 200))
def test_every_message_is_read_once_and_in_order(texts: list[str], max_bytes: int) -> None:
    state = JobState(branch="b", deadline=START)
    for number, text in enumerate(texts):
        state.receive(JobMessage(id=str(number), text=text))
        state.receive(JobMessage(id=str(number), text="again"))
    read: list[str] = []
    while state.inbox:
        state.read_inbox(max_bytes)
        assert state.pending, "each turn reads at least one"
        read += [message.content for message in state.pending]
        assert len(state.reading) == len(state.pending)
        state.advance(ContextRef(head="h"))
        assert state.reading == []
    assert read == texts
