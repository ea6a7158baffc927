"""What `muster status` shows of the scheduler: one line of counts, and what it learned of tools."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from muster.duration import show_duration

MAX_GAPS = 8
"""Tools shown: those that most sessions are out for now."""


def print_cohorts(console: Console, cohorts: dict[str, Any]) -> None:
    """Print the answer of `GET /cohorts` for people."""
    console.print(cohort_view(cohorts), highlight=False, soft_wrap=True)


def cohort_view(cohorts: dict[str, Any]) -> RenderableType:
    """Return what people see of `GET /cohorts`."""
    seen, tokens = cohorts["scheduler"], cohorts["tokens"]
    lines = [
        f"Steps        {seen['ready']} ready, {seen['running']} running",
        f"Sessions     {seen['admitted']} admitted, {seen['kept']} of them kept; "
        f"{seen['acting']} acting, {seen['cold']} cold",
        f"KV blocks    working set {seen['working_set']:,} of {seen['watermark']:,} "
        f"(cache {seen['num_blocks']:,}{_cache_state(cohorts['cache'])})",
        f"Prompts      {_share(tokens['cached'], tokens['prompt'])} cached, overhead "
        f"{cohorts['overhead']['computed_tokens']:,} tokens",
    ]
    if cohorts["gpu"]["wall_s"]:
        lines.append(f"Engine time  {_engine_time(cohorts['gpu'])}")
    if last := cohorts["last_cohorts"]:
        sizes = " ".join(str(len(cohort["steps"])) for cohort in last)
        lines.append(f"Last cohorts {sizes}")
    parts: list[RenderableType] = [Text("\n".join(lines))]
    if seen["gaps"]:
        parts.append(_gap_table(seen["gaps"]))
    return Group(*parts)


USES = {
    "useful_prefill_s": "prefill",
    "useful_decode_s": "decode",
    "pending_s": "in progress",
    "recompute_s": "computed again",
    "waste_s": "wasted",
    "gap_s": "gaps",
    "idle_ready_s": "idle with steps in line",
    "idle_s": "nothing to do",
}
"""What is shown of a `GPUAccount`; parts of less than half a percent are left out."""


def _engine_time(gpu: dict[str, float]) -> str:
    shares = {use: gpu[name] / gpu["wall_s"] for name, use in USES.items()}
    return ", ".join(f"{share:.0%} {use}" for use, share in shares.items() if share >= 0.005)


def _gap_table(gaps: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("waits for")
    for name in ("returned", "out", "median", "p90"):
        table.add_column(name, justify="right")
    for gap in sorted(gaps, key=lambda gap: (-gap["out"], -gap["returned"]))[:MAX_GAPS]:
        table.add_row(
            Text(gap["tool"]), f"{gap['returned']:,}", f"{gap['out']:,}",
            show_duration(gap["p50_s"]), show_duration(gap["p90_s"]),
        )  # fmt: skip
    return table


def _cache_state(cache: dict[str, Any] | None) -> str:
    if cache is None:
        return ", not told by the engine"
    return ", its events were lost" if cache["is_degraded"] else ""


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "none yet"
