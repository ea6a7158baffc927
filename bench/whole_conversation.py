"""An agent as durable engines run it today: each model call's input is the whole conversation.

It stands beside Muster's own in `bench.history`, for comparison alone.
"""

from __future__ import annotations

from datetime import timedelta

from temporalio import activity, workflow

with workflow.unsafe.imports_passed_through():
    from bench.tool.page import page
    from contracts.message import Frozen, Message, Role


class WholeInput(Frozen):
    """The opening text, how many tool calls follow, and the size of a result in bytes."""

    text: str
    calls: int
    tool_bytes: int


class ModelCall(Frozen):
    """Input of a model call: all there is."""

    messages: tuple[Message, ...]


@activity.defn
async def call_model(call: ModelCall) -> Message:
    """Ask for the next page; the model's own time is not what is measured."""
    return Message(role=Role.ASSISTANT, content=f"page {len(call.messages) // 2}")


@activity.defn
async def read_page(number: int, size: int) -> str:
    """Return a page."""
    return page(number, size)


@workflow.defn
class WholeConversation:
    """Calls the model with everything said so far, then a tool, again and again."""

    @workflow.run
    async def run(self, given: WholeInput) -> int:
        """Return the number of model calls."""
        messages = [Message(role=Role.USER, content=given.text)]
        limit = timedelta(minutes=5)
        for number in range(given.calls):
            answer = await workflow.execute_activity(
                call_model, ModelCall(messages=tuple(messages)), start_to_close_timeout=limit
            )
            result = await workflow.execute_activity(
                read_page, args=[number, given.tool_bytes], start_to_close_timeout=limit
            )
            messages += [answer, Message(role=Role.TOOL, content=result)]
        return given.calls
