"""How the nodes of a plan look in a terminal."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from contracts.plan_job import NodeStatus, PlanProgress
from muster.cli.view import printable
from workflows.plan_text import note

_STYLES = {
    NodeStatus.WAITING: "dim",
    NodeStatus.RUNNING: "cyan",
    NodeStatus.DONE: "green",
    NodeStatus.SKIPPED: "yellow",
    NodeStatus.FAILED: "red",
}


def node_table(plan: PlanProgress) -> Table:
    """Return one line for each node of a plan, those inside of maps aside."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("NODE", "KIND", "STATE", ""):
        table.add_column(title, overflow="fold")
    for node in plan.nodes:
        table.add_row(
            node.name,
            node.kind,
            Text(node.status.value, style=_STYLES[node.status]),
            printable(note(node)),
        )
    return table
