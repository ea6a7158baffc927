"""The tool worker's metrics, recorded where the process has a meter provider."""

from __future__ import annotations

from opentelemetry import metrics

TOOL_TIME = ("muster.tool.time", "s", "Time of attempts at tool calls, by how they ended")
"""Name, unit and meaning. Attributes: the `tool`, and the `outcome`: `ok`, `cancelled`, or whose
fault it was that there is no result (`FailureKind`)."""

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1_800)
"""Bounds of the buckets."""

_name, _unit, _what = TOOL_TIME
_tool_time = metrics.get_meter("muster.tools").create_histogram(
    _name, _unit, _what, explicit_bucket_boundaries_advisory=list(SECONDS)
)


def record_attempt(tool: str, outcome: str, duration_s: float) -> None:
    """Record an attempt that has ended."""
    _tool_time.record(duration_s, {"tool": tool, "outcome": outcome})
