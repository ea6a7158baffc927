"""What people read of a plan's job: one line, and its nodes as a table for the Temporal UI."""

from __future__ import annotations

from collections.abc import Iterable

from contracts.approval import JobWaits
from contracts.plan import Plan, node_kind
from contracts.plan_job import NodeProgress, NodeStatus, PlanProgress
from workflows.plan_state import BodyState, NodePath, NodeState, PlanState, shown
from workflows.text import one_line, pending_list

MAX_NAMED = 5
"""Nodes that the one line names."""

MAX_ROWS = 100
"""Nodes that the table shows: those that run or have failed, then the others in their order."""

MAX_CELL_CHARS = 80


def running_line(running: Iterable[NodePath]) -> str:
    """Return one line on what runs."""
    names = [shown(path) for path in running]
    if not names:
        return "nothing runs"
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return one_line(f"running {', '.join(names[:MAX_NAMED])}{more}")


def plan_progress(plan: Plan, root: BodyState, running: Iterable[NodePath]) -> PlanProgress:
    """Return how a plan's nodes stand."""
    empty = NodeState()
    nodes = []
    for name, node in plan.nodes.items():
        state = root.nodes.get(name, empty)
        done = state.items if state.status is NodeStatus.DONE else len(state.results)
        nodes.append(
            NodeProgress(
                name=name,
                kind=node_kind(node) or "",
                status=state.status,
                tries=state.tries,
                error=state.error,
                items=state.items,
                items_done=done or 0,
            )
        )
    return PlanProgress(
        nodes=tuple(nodes), running=tuple([shown(path) for path in running][:MAX_ROWS])
    )


def details(plan: Plan, state: PlanState, found: PlanProgress, waits: JobWaits) -> str:
    """Return the job's current details for the Temporal UI, as short Markdown."""
    usage = state.usage
    bound = " (at least)" if usage.lower_bound else ""
    ended = sum(node.status in (NodeStatus.DONE, NodeStatus.SKIPPED) for node in found.nodes)
    lines = [
        f"**{state.doing}**",
        "",
        "| plan | nodes | LLM steps | tool calls | prompt tokens | cached | generated | wasted |",
        "|---|---|---|---|---|---|---|---|",
        f"| {plan.name} | {ended} of {len(found.nodes)} | {state.llm_steps} | {state.tool_calls} "
        f"| {usage.prompt_tokens}{bound} | {usage.cached_tokens} | {usage.completion_tokens} "
        f"| {usage.wasted_tokens} |",
        "",
        "| node | kind | state | |",
        "|---|---|---|---|",
        *(_row(node) for node in _shown_first(found.nodes)),
    ]
    if len(found.nodes) > MAX_ROWS:
        lines.append(f"| … {len(found.nodes) - MAX_ROWS} more | | | |")
    return "\n".join(lines) + "\n" + pending_list(waits)


def note(node: NodeProgress) -> str:
    """Return what else is to be said of a node: its items, its failures, its error."""
    parts = [f"{node.items_done} of {node.items} items"] if node.items is not None else []
    if node.tries:
        parts.append(f"failed {node.tries} times" if node.tries > 1 else "failed once")
    if node.error:
        parts.append(node.error)
    return one_line("; ".join(parts), MAX_CELL_CHARS)


def _row(node: NodeProgress) -> str:
    told = note(node).replace("|", "\\|").replace("`", "'")
    return f"| {node.name} | {node.kind} | {node.status} | {told} |"


def _shown_first(nodes: tuple[NodeProgress, ...]) -> list[NodeProgress]:
    if len(nodes) <= MAX_ROWS:
        return list(nodes)
    live = (NodeStatus.RUNNING, NodeStatus.FAILED)
    return sorted(nodes, key=lambda node: node.status not in live)[:MAX_ROWS]
