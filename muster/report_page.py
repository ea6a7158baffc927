"""A report as one HTML file that needs nothing else: no network, no script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from jinja2 import Environment, PackageLoader, StrictUndefined

from muster.account import PARTS, Account, Split
from muster.advice import BOUNDS
from muster.cli.cohort import USES
from muster.cli.report_view import engine_text, made_text, token_text
from muster.cli.view import counted, printable
from muster.duration import show_duration
from muster.time_report import EngineTime, JobTimes, PeriodTimes

MAX_TURNS = 200
"""Turns drawn: the first; the terminal's `muster show` lists all."""

MAX_ROWS = 50
"""Tools or agents listed: those first that took longest."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One part of a bar: where it begins and how wide it is, in percent of the bar's width."""

    label: str
    colour: str
    seconds: float
    start: float
    width: float


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar; `label` stands before it, `note` after it."""

    label: str
    pieces: Sequence[Piece]
    note: str = ""


_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "orchestration_s": "host-1", "host_pre_s": "host-2", "backlog_s": "gpu-1",
        "line_s": "gpu-2", "engine_queue_s": "gpu-3", "prefill_s": "gpu-4", "decode_s": "gpu-5",
        "host_post_s": "host-3", "tools_s": "tool-1", "sub_agents_s": "tool-2",
        "people_s": "people", "unfinished_s": "lost", "other_s": "host-4",
    }
)  # fmt: skip
"""The class of each part's colour; those of one bound are shades of one hue."""

_ENGINE_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "useful_prefill_s": "gpu-4", "useful_decode_s": "gpu-5", "pending_s": "gpu-3",
        "recompute_s": "people", "waste_s": "lost", "gap_s": "host-1", "idle_ready_s": "host-3",
        "idle_s": "idle",
    }
)  # fmt: skip

assert set(_COLOURS) == set(PARTS) == set(BOUNDS)
assert set(_ENGINE_COLOURS) == set(USES)


def job_page(times: JobTimes, link: str) -> str:
    """Return the page of one job; `link` leads to it in the Temporal UI, if that is known."""
    longest_s = max((turn.split.total_s for turn in times.turns), default=0.0)
    turns = [
        Bar(
            str(turn.turn),
            _pieces(turn.split, longest_s),
            f"{show_duration(turn.split.total_s)}  {', '.join(turn.tools)}".strip(),
        )
        for turn in times.turns[:MAX_TURNS]
    ]
    facts = {
        "agent": times.agent or "?",
        "model": times.model or "?",
        "tenant": times.tenant or "?",
        "started": f"{times.started_at:%Y-%m-%d %H:%M:%S} UTC",
        "took": show_duration(times.account.wall_s) + ("" if times.closed_at else " so far"),
    }
    return _render(
        title=f"{times.job_id} · {times.status.value}",
        advice=times.advice.text,
        facts=facts,
        account=times.account,
        turns=turns,
        turns_left=max(0, len(times.turns) - MAX_TURNS),
        link=link,
    )


def period_page(times: PeriodTimes) -> str:
    """Return the page of a period's jobs."""
    account = times.account
    states = ", ".join(f"{number:,} {state}" for state, number in times.states.items())
    facts = {"from": f"{times.since:%Y-%m-%d %H:%M:%S} UTC"}
    facts["to"] = f"{times.until:%Y-%m-%d %H:%M:%S} UTC"
    facts |= {"agent": times.agent} if times.agent else {}
    facts |= {"tenant": times.tenant} if times.tenant else {}
    facts["ended"] = states or "none"
    return _render(
        title=counted(account.jobs, "job"),
        advice=times.advice.text,
        facts=facts,
        account=account,
        agents=[
            Bar(
                each.agent or "?",
                _pieces(each.account.split, each.account.split.total_s),
                f"{each.account.jobs:,} × {show_duration(each.account.wall_s / each.account.jobs)}"
                f"  {each.advice.share:.0%} {each.advice.bound.value}",
            )
            for each in times.agents[:MAX_ROWS]
        ],
        agents_left=max(0, len(times.agents) - MAX_ROWS),
        engine=_engine_bar(times.engine) if times.engine else None,
        asks_engine=True,
    )


def _render(*, account: Account, **values: object) -> str:
    environment = Environment(
        loader=PackageLoader("muster", "template"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Control characters are no part of HTML, escaped or not.
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.filters["duration"] = show_duration
    split = account.split
    whole = Bar("", _pieces(split, split.total_s))
    absent = {"turns": (), "turns_left": 0, "agents": (), "agents_left": 0, "link": ""}
    given = absent | {"engine": None, "asks_engine": False} | values
    return environment.get_template("report.html.j2").render(
        account=account,
        whole=whole,
        parts=[(PARTS[name], BOUNDS[name], _COLOURS[name], getattr(split, name)) for name in PARTS],
        whole_s=split.total_s,
        tools=account.tools[:MAX_ROWS],
        tools_left=max(0, len(account.tools) - MAX_ROWS),
        made_text=made_text(account),
        token_text=token_text(account.tokens),
        engine_text=engine_text(account),
        **given,
    )


def _pieces(split: Split, whole_s: float) -> list[Piece]:
    """Return the parts of a bar that is as wide as `whole_s`."""
    seconds = {name: getattr(split, name) for name in PARTS}
    return _cut(seconds, {n: shown for n, (shown, _) in PARTS.items()}, _COLOURS, whole_s)


def _engine_bar(engine: EngineTime) -> Bar:
    seconds = {name: getattr(engine, name) for name in USES}
    pieces = _cut(seconds, USES, _ENGINE_COLOURS, max(engine.wall_s, sum(seconds.values())))
    note = (
        f"since its start, {show_duration(engine.wall_s)} ago; opportunity {engine.opportunity:.0%}"
    )
    return Bar("", pieces, note)


def _cut(
    seconds: Mapping[str, float],
    labels: Mapping[str, str],
    colours: Mapping[str, str],
    whole_s: float,
) -> list[Piece]:
    pieces: list[Piece] = []
    start = 0.0
    for name, part_s in seconds.items():
        if part_s > 0 and whole_s > 0:
            width = 100.0 * part_s / whole_s
            pieces.append(Piece(labels[name], colours[name], part_s, start, width))
            start += width
    return pieces
