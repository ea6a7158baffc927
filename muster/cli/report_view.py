"""How reports look in a terminal. Pure: reports in, text out."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from muster.account import PARTS, Account, Tokens, ToolTime
from muster.cli.cohort import USES
from muster.cli.view import counted, printable
from muster.duration import show_duration
from muster.time_report import EngineTime, JobTimes, PeriodTimes

MAX_TOOLS = 10
"""Tools shown: those that were waited for longest."""

MAX_AGENTS = 20

BAR_CELLS = 24


def job_times_view(times: JobTimes) -> RenderableType:
    """Return where the time of one job went."""
    head = Text.assemble(
        ("job ", "bold"), times.job_id, f"  {times.status.value}  ", printable(times.agent or "?"),
        " on ", printable(times.model or "?"), f"  {show_duration(times.account.wall_s)}",
        "" if times.closed_at else " so far",
    )  # fmt: skip
    return Group(head, *_body(times.advice.text, times.account))


def period_times_view(times: PeriodTimes) -> RenderableType:
    """Return where the time of a period's jobs went."""
    since = times.since.astimezone()
    whose = f" of agent {printable(times.agent)}" if times.agent else ""
    whose += f" of tenant {printable(times.tenant)}" if times.tenant else ""
    states = ", ".join(f"{number:,} {state}" for state, number in times.states.items())
    if not times.account.jobs:
        head = Text(f"no job{whose} has ended since {since:%Y-%m-%d %H:%M:%S}")
        return Group(head, *_engine(times.engine))
    head = Text.assemble(
        (counted(times.account.jobs, "job"), "bold"),
        f"{whose} ended since {since:%Y-%m-%d %H:%M:%S}: {states}",
    )
    parts = _body(times.advice.text, times.account)
    if len(times.agents) > 1:
        parts.append(_agent_table(times))
    return Group(head, *parts, *_engine(times.engine))


def share_text(share: float | None) -> str:
    """Return a share, 0 to 1, as people read it."""
    return "none" if share is None else f"{share:.0%}"


def token_text(tokens: Tokens) -> str:
    """Return the tokens and the cache's part in them, in one line."""
    bound = "at least " if tokens.lower_bound else ""
    wasted = f" ({tokens.wasted:,} of them wasted)" if tokens.wasted else ""
    return (
        f"{bound}{tokens.prompt:,} prompt tokens, {share_text(tokens.cached_share)} cached of "
        f"{share_text(tokens.attainable_share)} attainable; {tokens.completion:,} generated{wasted}"
    )


def made_text(account: Account) -> str:
    """Return what was made in that time."""
    return f"{counted(account.llm_steps, 'LLM step')}, {counted(account.tool_calls, 'tool call')}"


def engine_text(account: Account) -> str:
    """Return the time in the engine, and what it cost if a price is known, in one line."""
    text = f"{show_duration(account.engine_s)} in the engine (prefill and decode of each step)"
    if cost := account.cost:
        text += f", at most {cost.at_most:,.4f} at {cost.gpu_hour_price:,.2f} a GPU hour"
    return text


def _body(advice: str, account: Account) -> list[RenderableType]:
    parts: list[RenderableType] = [
        Text(printable(advice), style="bold yellow"),
        _split_table(account),
        Text(f"Tokens  {token_text(account.tokens)}"),
        Text(f"Engine  {engine_text(account)}"),
    ]
    if account.tools:
        parts.append(_tool_table(account.tools))
    return parts


def _split_table(account: Account) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("time in", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, width=BAR_CELLS)
    table.add_column("", style="dim")
    whole_s = account.split.total_s
    for name, (shown, what) in PARTS.items():
        seconds = getattr(account.split, name)
        if seconds or name not in ("sub_agents_s", "people_s", "unfinished_s"):
            share = seconds / whole_s if whole_s else 0.0
            bar = "█" * round(share * BAR_CELLS)
            table.add_row(shown, f"{seconds:,.3f}", f"{share:.0%}", bar, what)
    table.add_section()
    jobs = "wall" if account.jobs == 1 else f"wall of {account.jobs:,} jobs"
    table.add_row(jobs, f"{account.wall_s:,.3f}", "", "", made_text(account))
    return table


def _tool_table(tools: Sequence[ToolTime]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("waited for")
    for name in ("calls", "failed", "waited", "inside the tool", "longest"):
        table.add_column(name, justify="right", no_wrap=True)
    for tool in tools[:MAX_TOOLS]:
        table.add_row(
            Text(printable(tool.tool) + (" (sub-agent)" if tool.is_sub_agent else "")),
            f"{tool.calls:,}", f"{tool.failed:,}", show_duration(tool.waited_s),
            "" if tool.is_sub_agent else show_duration(tool.inside_s),
            show_duration(tool.longest_s),
        )  # fmt: skip
    if len(tools) > MAX_TOOLS:
        table.add_row(Text(f"… {len(tools) - MAX_TOOLS:,} more", style="dim"))
    return table


def _agent_table(times: PeriodTimes) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("agent")
    for name in ("jobs", "mean wall", "cached"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for each in times.agents[:MAX_AGENTS]:
        account = each.account
        table.add_row(
            Text(printable(each.agent or "?")), f"{account.jobs:,}",
            show_duration(account.wall_s / account.jobs),
            share_text(account.tokens.cached_share),
            Text(f"{each.advice.share:.0%} {each.advice.bound.value}"),
        )  # fmt: skip
    if len(times.agents) > MAX_AGENTS:
        table.add_row(Text(f"… {len(times.agents) - MAX_AGENTS:,} more", style="dim"))
    return table


def _engine(engine: EngineTime | None) -> list[RenderableType]:
    if engine is None:
        text = "no inference service answers: what the engine did is not known"
        return [Text(text, style="dim")]
    shares = {use: getattr(engine, name) / engine.wall_s for name, use in USES.items()}
    uses = ", ".join(f"{share:.0%} {use}" for use, share in shares.items() if share >= 0.005)
    return [
        Text(f"GPU     since its start, {show_duration(engine.wall_s)} ago: {uses}"),
        Text(f"        opportunity {engine.opportunity:.0%}: what better serving could have used"),
    ]
