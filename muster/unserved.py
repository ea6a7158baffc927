"""Which task queues of an agent's tools nobody polls: said when a job starts, not when it fails."""

from __future__ import annotations

from collections.abc import Iterator

from temporalio.client import Client

from contracts.agent import AgentSpec, ToolRef
from contracts.error import UnavailableError
from muster.stack.queue import ACTIVITY, pollers


async def unserved_queues(client: Client, agent: AgentSpec) -> list[str]:
    """Return a line for each queue of a group or an activity that no worker has polled lately.

    The server remembers for five minutes who polled. Sub-agents' tools count too. The queue of the
    other tools is left out: every stack has it, and `muster doctor` looks at it. Returns none where
    the server does not tell.
    """
    lines: list[str] = []
    for queue, tool in sorted(_by_queue(agent).items()):
        try:
            if await pollers(client, queue, ACTIVITY):
                continue
        except UnavailableError:  # the start of the job says that better
            return []
        wait = f"{tool.queue_timeout.total_seconds():g} s"
        lines.append(
            f"no worker polls task queue {queue!r}: calls of {tool.tool_name or tool.shown!r} wait "
            f"there for {wait} (queue_timeout), then fail"
        )
    return lines


def _by_queue(agent: AgentSpec) -> dict[str, ToolRef]:
    """Return a tool of each queue that is not the common one."""
    return {tool.queue: tool for tool in _tools(agent) if tool.group or tool.activity}


def _tools(agent: AgentSpec) -> Iterator[ToolRef]:
    yield from agent.tools
    for each in agent.agents:
        yield from _tools(each.agent)
