"""The short texts that people read in the Temporal UI: activity summaries and current details."""

from __future__ import annotations

from contracts.agent import AgentSpec
from contracts.approval import JobWaits, PendingApproval
from contracts.job import AgentJobResult, StopReason
from contracts.llm_step import OutputForm
from contracts.message import ToolCall
from contracts.tool import ToolOutcome
from workflows.state import JobState

MAX_SUMMARY_CHARS = 120
"""A summary is one line of a list."""

MAX_SUMMARY_BYTES = 360
"""Temporal refuses summaries over 400 bytes of JSON, and then the workflow task fails."""

MAX_ERROR_CHARS = 2_000
"""An error text that the model reads, or that a job fails with."""

_ELLIPSIS = "…"


def one_line(text: str, max_chars: int = MAX_SUMMARY_CHARS) -> str:
    """Return `text` on one line of at most `max_chars`, control characters left out."""
    head = text[: 4 * max_chars]
    line = " ".join("".join(c if c.isprintable() else " " for c in head).split())
    if len(line) <= max_chars and len(head) == len(text):
        return line
    return line[: max_chars - 1] + _ELLIPSIS


def summary(text: str) -> str:
    """Return `text` as an activity summary that the server accepts."""
    line = one_line(text)
    size = 2
    for place, char in enumerate(line):
        size += _json_bytes(char)
        if size > MAX_SUMMARY_BYTES - _json_bytes(_ELLIPSIS):
            return line[:place] + _ELLIPSIS
    return line


def _json_bytes(char: str) -> int:
    """Return the most bytes that `char` takes in JSON, whichever way it is escaped."""
    if char in '"\\':
        return 2
    if char.isascii():
        return 1
    return 6 if ord(char) < 0x10000 else 12


def step_summary(number: int, form: OutputForm) -> str:
    """Return one line on an LLM step: its number and what the model may do."""
    choices = (["answer"] if form.may_answer else []) + [f"call {name}" for name in form.tools]
    return summary(f"LLM step {number}: {' | '.join(choices)}")


def call_summary(call: ToolCall) -> str:
    """Return one line on a tool call: the tool and its arguments, shortened."""
    return summary(f"{call.tool}({arguments_line(call)})")


def arguments_line(call: ToolCall) -> str:
    """Return a call's arguments as one writes them, each shortened."""
    return ", ".join(f"{name}={_shown(value)}" for name, value in call.arguments.items())


def sub_agent_answer(result: AgentJobResult) -> tuple[str, ToolOutcome]:
    """Return what a caller's model reads of a sub-agent's result, and whether that is an answer."""
    stop = result.stop_reason
    if result.answer is None:
        return f"error: stopped without an answer at its limit {stop}", ToolOutcome.ERROR
    if stop is StopReason.ANSWERED:
        return result.answer, ToolOutcome.OK
    return f"{result.answer}\n(It had to stop at its limit {stop}.)", ToolOutcome.OK


def _shown(value: object) -> str:
    """Return a cheap preview of an argument; large containers are not rendered whole."""
    if isinstance(value, str):
        return repr(value[:MAX_SUMMARY_CHARS])
    if isinstance(value, list | dict):
        return f"{type(value).__name__} of {len(value)}"
    return repr(value)


def details(agent: AgentSpec, state: JobState, waits: JobWaits) -> str:
    """Return the job's current details for the Temporal UI, as short Markdown."""
    limits, usage = agent.limits, state.usage
    lower_bound = " (at least)" if usage.lower_bound else ""
    return (
        f"**{state.doing}**\n\n"
        f"| agent | turns | tool calls | prompt tokens | cached | generated | wasted |\n"
        f"|---|---|---|---|---|---|---|\n"
        f"| {agent.name} | {state.turns} of {limits.max_turns} "
        f"| {state.tool_calls} of {limits.max_tool_calls} "
        f"| {usage.prompt_tokens}{lower_bound} | {usage.cached_tokens} "
        f"| {usage.completion_tokens} | {usage.wasted_tokens} |\n"
        f"{pending_list(waits)}"
    )


def pending_list(waits: JobWaits) -> str:
    """Return the calls that wait for people, as a Markdown list; no text if there are none.

    Not as a table: the Temporal UI has half a page for it, and a call's id is long.
    """
    if not waits.pending:
        return ""
    return "\n".join(["", "Waits for approval:", "", *map(_pending_line, waits.pending)]) + "\n"


def _pending_line(each: PendingApproval) -> str:
    call = one_line(f"{each.tool}({each.arguments})").replace("`", "'")
    names = f" ({', '.join(each.approved_by)})" if each.approved_by else ""
    parts = [
        f"{len(each.approved_by)} of {each.people} approved{names}",
        f"{', '.join(each.by) or 'anyone'} may decide",
        f"asked {each.asked_at:%Y-%m-%d %H:%M:%S} UTC",
        f"denied at {each.expires_at:%Y-%m-%d %H:%M:%S} UTC" if each.expires_at else "",
        one_line(each.note).replace("`", "'"),
    ]
    return f"- `{call}`: {'; '.join(filter(None, parts))}; call `{each.call_id}`"
