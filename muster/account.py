"""Where time, tokens and money went, of one job or of many: one shape for both.

Made from a job's report (its history) or from sums over projections; for a closed job both are the
same. Of many jobs all figures are sums, so seconds are job-seconds, not those of a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from contracts.llm_step import Usage
from contracts.message import Frozen
from muster.report import JobReport
from muster.turn_row import TimeParts, ToolRow, TurnRow
from store.summary import CallTotals, Totals

SECONDS_PER_HOUR = 3_600.0


class Split(Frozen):
    """Seconds by what they went to; each second is in one part.

    `backlog_s` and `line_s` are the two halves of `ready_wait`: on Temporal's task queue, and in
    the service's line. `tools_s` is the time during which tools were waited for, `sub_agents_s`
    that during which only sub-agents were. `other_s` is what lies between the activities.
    """

    orchestration_s: float = 0.0
    host_pre_s: float = 0.0
    backlog_s: float = 0.0
    line_s: float = 0.0
    engine_queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    host_post_s: float = 0.0
    tools_s: float = 0.0
    sub_agents_s: float = 0.0
    people_s: float = 0.0
    unfinished_s: float = 0.0
    other_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Sum of all parts; above the wall time if parts of a job ran side by side."""
        return float(sum(self.model_dump().values()))


PARTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "orchestration_s": ("orchestration", "Temporal and the workers, around LLM steps"),
        "host_pre_s": ("host_pre", "resolve, render, tokenise"),
        "backlog_s": ("ready_wait: backlog", "ready, on Temporal's task queue"),
        "line_s": ("ready_wait: line", "ready, waiting for the scheduler"),
        "engine_queue_s": ("engine_queue", "waiting inside the engine"),
        "prefill_s": ("prefill", "reading the prompt"),
        "decode_s": ("decode", "generating"),
        "host_post_s": ("host_post", "parse, validate, commit"),
        "tools_s": ("tools", "at least one tool call in flight"),
        "sub_agents_s": ("sub-agents", "waiting for the jobs of sub-agents alone"),
        "people_s": ("people", "approvals and pauses"),
        "unfinished_s": ("unfinished", "LLM steps that did not finish"),
        "other_s": ("between", "workflow, opening the job"),
    }
)
"""Each part of a `Split`, what people read, and what it is."""


class Tokens(Frozen):
    """Tokens of a job's own LLM steps, all attempts together.

    `attainable` of the `prompt` tokens a cache that never evicts would have held; shares are of the
    prompt tokens, 0 to 1, and None where there are none.
    """

    prompt: int
    cached: int
    attainable: int
    completion: int
    wasted: int
    lower_bound: bool
    cached_share: float | None
    attainable_share: float | None


class ToolTime(Frozen):
    """Calls of one tool, or sub-agent; `waited_s` from asked for to answered, all calls added up.

    `inside_s` is what the tool itself took, as far as it told: the rest is its task queue.
    """

    tool: str
    is_sub_agent: bool
    calls: int
    failed: int
    waited_s: float
    inside_s: float
    longest_s: float


class Cost(Frozen):
    """What `engine_s` would cost alone on an engine; a batch shares it, so it is an upper bound."""

    gpu_hour_price: float
    at_most: float


class Account(Frozen):
    """Where time, tokens and money went."""

    jobs: int
    wall_s: float
    turns: int
    llm_steps: int
    tool_calls: int
    split: Split
    tokens: Tokens
    engine_s: float
    """Prefill and decode of all LLM steps; steps that share a batch count it each."""
    cost: Cost | None
    tools: tuple[ToolTime, ...]
    """Those first that were waited for longest."""


def account_of(totals: Totals, calls: Iterable[CallTotals], price: float) -> Account:
    """Return the account of sums; `price` is of one GPU hour, 0 if nobody told it."""
    made = merged(calls)
    engine_s = totals.prefill_s + totals.decode_s
    cost_at_most = price * engine_s / SECONDS_PER_HOUR
    return Account(
        jobs=totals.jobs,
        wall_s=totals.wall_s,
        turns=totals.turns,
        llm_steps=totals.llm_steps,
        tool_calls=sum(each.calls for each in made if not each.is_sub_agent),
        split=_split(totals),
        tokens=_tokens(totals),
        engine_s=engine_s,
        cost=Cost(gpu_hour_price=price, at_most=cost_at_most) if price else None,
        tools=tuple(
            ToolTime(**{name: getattr(each, name) for name in ToolTime.model_fields})
            for each in made
        ),
    )


def totals_of(report: JobReport) -> Totals:
    """Return the sums of one job's report, as its projections would give them."""
    turns = sum((turn_totals(row) for row in report.rows), Totals())
    return turns + Totals(
        jobs=1, wall_s=report.wall_s, people_s=report.people_s, other_s=report.other_s
    )


def turn_totals(row: TurnRow) -> Totals:
    """Return the sums of one turn."""
    step = row.step
    usage = step.usage if step else Usage()
    time = (step.time if step else None) or TimeParts()
    parts = time.model_copy(update={"tool_s": row.tool_s}).model_dump()
    return Totals(
        turns=1,
        llm_steps=int(step is not None),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        wasted_tokens=usage.wasted_tokens,
        attainable_tokens=step.attainable_tokens if step else 0,
        lower_bound=row.usage.lower_bound,
        **parts,
        backlog_s=step.backlog_s if step else 0.0,
        sub_agent_s=row.sub_agent_s,
        unfinished_s=step.unfinished_s if step else 0.0,
    )


def calls_of(rows: Iterable[TurnRow]) -> list[CallTotals]:
    """Return the sums over the calls of turns, each tool once."""
    return merged(_call(tool) for row in rows for tool in row.tools)


def turn_split(row: TurnRow) -> Split:
    """Return where one turn's time went."""
    return _split(turn_totals(row))


def merged(calls: Iterable[CallTotals]) -> list[CallTotals]:
    """Return sums with each tool once, those first that were waited for longest."""
    found: dict[tuple[str, bool], CallTotals] = {}
    for each in calls:
        key = each.tool, each.is_sub_agent
        found[key] = found[key] + each if key in found else each
    return sorted(found.values(), key=lambda each: (-each.waited_s, each.tool))


def _call(row: ToolRow) -> CallTotals:
    return CallTotals(
        tool=row.tool,
        is_sub_agent=row.sub_job is not None,
        calls=1,
        failed=int(row.is_failed),
        waited_s=row.total_s,
        inside_s=row.duration_s or 0.0,
        longest_s=row.total_s,
    )


def _split(totals: Totals) -> Split:
    return Split(
        orchestration_s=totals.orchestration_s,
        host_pre_s=totals.host_pre_s,
        backlog_s=totals.backlog_s,
        line_s=max(0.0, totals.ready_wait_s - totals.backlog_s),
        engine_queue_s=totals.engine_queue_s,
        prefill_s=totals.prefill_s,
        decode_s=totals.decode_s,
        host_post_s=totals.host_post_s,
        tools_s=max(0.0, totals.tool_s - totals.sub_agent_s),
        sub_agents_s=totals.sub_agent_s,
        people_s=totals.people_s,
        unfinished_s=totals.unfinished_s,
        other_s=totals.other_s,
    )


def _tokens(totals: Totals) -> Tokens:
    prompt = totals.prompt_tokens
    return Tokens(
        prompt=prompt,
        cached=totals.cached_tokens,
        attainable=totals.attainable_tokens,
        completion=totals.completion_tokens,
        wasted=totals.wasted_tokens,
        lower_bound=totals.lower_bound,
        cached_share=totals.cached_tokens / prompt if prompt else None,
        attainable_share=totals.attainable_tokens / prompt if prompt else None,
    )
