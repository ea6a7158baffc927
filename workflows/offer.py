"""What the model may do in the next LLM step: which tools it may call, whether it may answer."""

from __future__ import annotations

from contracts.agent import AgentSpec, SubAgent, ToolRef
from contracts.error import MusterError
from contracts.llm_step import OutputForm
from workflows.state import JobState
from workflows.text import one_line


class NothingOfferedError(MusterError):
    """No tool may be called any more, and the answer is still held back."""


def calls_left(tool: ToolRef | SubAgent, state: JobState) -> int | None:
    """Return how often `tool` may still be called, None if its policy sets no limit."""
    if tool.max_calls is None:
        return None
    return max(0, tool.max_calls - state.tally(tool.tool_name).calls)


def held_back_by(names: tuple[str, ...], state: JobState) -> tuple[str, ...]:
    """Return those of `names` that have not answered yet; an error is not an answer."""
    return tuple(name for name in names if state.tally(name).answers == 0)


def offer(agent: AgentSpec, state: JobState) -> OutputForm:
    """Return the form of the next assistant message.

    Raises `NothingOfferedError` if the model could neither call a tool nor answer.
    """
    tools = [
        tool
        for tool in agent.callables
        if calls_left(tool, state) != 0 and not held_back_by(tool.after, state)
    ]
    may_answer = not held_back_by(agent.answer_after, state)
    if not tools and not may_answer:
        raise _nothing_offered(agent, state)
    return OutputForm(
        tools=tuple(tool.tool_name for tool in tools),
        may_answer=may_answer,
        max_calls=_max_calls(agent, tools, state),
    )


def _max_calls(agent: AgentSpec, tools: list[ToolRef | SubAgent], state: JobState) -> int:
    """Return how many calls one message may hold, at least 1."""
    bounds = [agent.max_parallel_tool_calls, agent.limits.max_tool_calls - state.tool_calls]
    left = [calls_left(tool, state) for tool in tools]
    if tools and None not in left:
        bounds.append(sum(count for count in left if count is not None))
    return max(1, min(bounds))


def _nothing_offered(agent: AgentSpec, state: JobState) -> NothingOfferedError:
    missing = held_back_by(agent.answer_after, state)
    causes = [_why_not(tool, state) for tool in agent.callables]
    return NothingOfferedError(
        f"agent {agent.name!r} can go on no further: its answer waits for "
        f"{', '.join(missing)}, and no tool may be called ({'; '.join(causes)})",
        hint="raise `max_calls` (failed calls count too), or change `after` or `answer_after`",
    )


def _why_not(tool: ToolRef | SubAgent, state: JobState) -> str:
    """Return why a tool that is not offered is not."""
    name, tally = tool.tool_name, state.tally(tool.tool_name)
    if calls_left(tool, state) == 0:
        error = f", last error: {one_line(tally.last_error)}" if tally.last_error else ""
        return f"{name} was called {tally.calls} of {tool.max_calls} times{error}"
    return f"{name} waits for {', '.join(held_back_by(tool.after, state))}"
