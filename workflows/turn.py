"""One turn: what is done with each call of an assistant message, and the messages that answer it.

Every call gets exactly one tool message, in the order of the calls, whatever the model asked for:
a call that may not be made is answered with an error text instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pydantic_core import to_json

from contracts.agent import AgentSpec, SubAgent, ToolRef
from contracts.job import StopReason
from contracts.limit import MAX_APPEND_BYTES, MAX_CARRIED_BYTES
from contracts.llm_step import OutputForm
from contracts.message import Message, Role, ToolCall
from contracts.tool import ToolOutcome
from workflows.offer import calls_left, held_back_by
from workflows.state import JobState, OpenCall
from workflows.text import one_line

MAX_NAME_CHARS = 80
"""A tool name the model made up is shown no longer than this."""

_JOB_BYTES = 4_000
"""What a run's input holds beside agent and state: names, a preview of the input, keys of JSON."""


def plan_calls(
    calls: Sequence[ToolCall], form: OutputForm, agent: AgentSpec, state: JobState
) -> list[OpenCall]:
    """Return `calls` in their order, answered already where they may not be made.

    `form` is what was offered to the model.
    """
    known = {tool.tool_name: tool for tool in agent.callables}
    made: Counter[str] = Counter()
    seen: set[str] = set()
    plan: list[OpenCall] = []
    for call in calls:
        error = _error(call, known, form, agent, state, made)
        if not error and call.id in seen:
            error = f"error: the call id {one_line(call.id, MAX_NAME_CHARS)!r} is used twice"
        seen.add(call.id)
        if not error:
            made[call.tool] += 1
        plan.append(OpenCall(call=call, answer=error or None))
    return plan


def _error(
    call: ToolCall,
    known: dict[str, ToolRef | SubAgent],
    form: OutputForm,
    agent: AgentSpec,
    state: JobState,
    made: Counter[str],
) -> str:
    """Return why `call` may not be made after those `made` in the same message, or no text."""
    name = one_line(call.tool, MAX_NAME_CHARS)
    tool = known.get(call.tool)
    if tool is None:
        return f"error: there is no tool {name!r}; {_choices(form)}"
    missing = held_back_by(tool.after, state)
    if missing:
        return f"error: {name} may be called only after {', '.join(missing)}; {_choices(form)}"
    left = calls_left(tool, state)
    if left is not None and made[call.tool] >= left:
        return f"error: {name} may be called at most {tool.max_calls} times; {_choices(form)}"
    if call.tool not in form.tools:
        return f"error: {name} may not be called now; {_choices(form)}"
    if made.total() >= agent.max_parallel_tool_calls:
        return (
            f"error: {name} was not called: one message may call at most "
            f"{agent.max_parallel_tool_calls} tools at once; call it again if it is still needed"
        )
    return ""


def _choices(form: OutputForm) -> str:
    """Return what the model could have done instead."""
    if not form.tools:
        return "answer now, without calling a tool"
    return f"the tools that may be called are: {', '.join(form.tools)}"


def tool_messages(calls: Sequence[OpenCall], missing: str = "") -> list[Message]:
    """Return the messages that answer `calls`, in their order; `missing` for lack of an answer."""
    return fit(
        [
            Message(
                role=Role.TOOL,
                content=missing if each.answer is None else each.answer,
                tool_call_id=each.call.id,
                tool=each.call.tool,
                blob=each.blob,
            )
            for each in calls
        ]
    )


def shrink(agent: AgentSpec, state: JobState, limit: int = MAX_CARRIED_BYTES) -> None:
    """Cut down what a job hands on to its next run until it fits one payload.

    Arguments of calls that have their answer go: nobody reads them again. That is enough for all
    that tool workers return. Beyond it, the largest is replaced by an error text: an answer of a
    sub-agent or of a remote activity, or a call that is still to be made.
    """
    for each in state.calls:
        if each.answer is not None:
            each.call = each.call.model_copy(update={"arguments": {}})
    others = state.model_copy(update={"calls": [], "pending": []})
    room = limit - _JOB_BYTES - len(to_json(agent)) - len(to_json(others))
    state.pending = fit(state.pending, room)
    sizes = [len(to_json(each)) for each in state.calls]
    for place in _largest_first(sizes):
        if sum(sizes) <= room:
            break
        each = state.calls[place]
        if each.answer is None:
            text = (
                f"error: {each.call.tool} was not called: its arguments have {sizes[place]:,} "
                f"bytes, more than a job can keep for so long; call it again, with less"
            )
            state.count_answer(each.call.tool, ToolOutcome.ERROR, text)
        else:
            text = _too_large(sizes[place], room)
        call = each.call.model_copy(update={"arguments": {}})
        state.calls[place] = each.model_copy(update={"call": call, "answer": text, "blob": None})
        sizes[place] = len(to_json(state.calls[place]))


def limit_error(stop: StopReason) -> str:
    """Return what the model reads of a call that a limit of its job has stopped."""
    return f"error: not done: the job has reached its limit {stop}"


def last_words(stop: StopReason) -> Message:
    """Return the message that asks for the last answer."""
    return Message(
        role=Role.USER,
        content=f"The limit {stop} is reached: no tool can be called any more. "
        f"Answer now, with what you have.",
    )


def answer_refused(form: OutputForm) -> Message:
    """Return the message that sends back an answer given before its tools have answered."""
    return Message(role=Role.USER, content=f"Do not answer yet: {_choices(form)}.")


def fit(messages: Sequence[Message], limit: int = MAX_APPEND_BYTES) -> list[Message]:
    """Return `messages`, the largest replaced by an error text until their JSON fits `limit`.

    A tool worker hands on large results by reference, so those of a turn fit. This is for workers
    of before, whose results can together still be too much for one payload.
    """
    sizes = [len(to_json(message)) for message in messages]
    fitting = list(messages)
    for place in _largest_first(sizes):
        if sum(sizes) <= limit:
            break
        fitting[place] = messages[place].model_copy(
            update={"content": _too_large(sizes[place], limit), "blob": None}
        )
        sizes[place] = len(to_json(fitting[place]))
    return fitting


def _largest_first(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda place: sizes[place], reverse=True)


def _too_large(size: int, limit: int) -> str:
    return (
        f"error: the result has {size:,} bytes, and the results of this turn together would pass "
        f"the limit of {limit:,} bytes; ask for less, or call fewer tools at once"
    )
