"""What the split of time means, in one line: is it the GPU, the tools, the host, or people?

Plain rules over shares. Each part of the time belongs to one bound, `MOSTLY` of the time makes a
bound the verdict, and what stands out inside it says what to do. No clock, no model: the same
account gives the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from contracts.message import Frozen
from muster.account import PARTS, Account, Split

MOSTLY = 0.5
"""A bound with this share of the time is what the time went to; a part, what its bound did."""

LOST_CACHE = 0.2
"""This share of the prompts computed again, though sessions had it, is a cache too small."""


class Bound(StrEnum):
    """What kept a job, or jobs, from being faster."""

    TOOLS = "tool-bound"
    GPU = "GPU-bound"
    HOST = "host-bound"
    PEOPLE = "people-bound"
    SUB_AGENTS = "bound by sub-agents"
    UNFINISHED = "unfinished"
    MIXED = "mixed"
    NOTHING = "nothing"
    """No time has passed in it yet."""


BOUNDS: Mapping[str, Bound] = MappingProxyType(
    {
        "orchestration_s": Bound.HOST,
        "host_pre_s": Bound.HOST,
        "backlog_s": Bound.GPU,
        "line_s": Bound.GPU,
        "engine_queue_s": Bound.GPU,
        "prefill_s": Bound.GPU,
        "decode_s": Bound.GPU,
        "host_post_s": Bound.HOST,
        "tools_s": Bound.TOOLS,
        "sub_agents_s": Bound.SUB_AGENTS,
        "people_s": Bound.PEOPLE,
        "unfinished_s": Bound.UNFINISHED,
        "other_s": Bound.HOST,
    }
)
"""The bound to which each part of a `Split` belongs."""


class Advice(Frozen):
    """The verdict: its bound, that bound's share of the time (0 to 1), and one line for people."""

    bound: Bound
    share: float
    text: str


def bound_shares(split: Split) -> dict[Bound, float]:
    """Return the share of the time that each bound has, the largest first; empty without time."""
    parts, total_s = split.model_dump(), split.total_s
    if total_s <= 0:
        return {}
    shares: dict[Bound, float] = {}
    for name, seconds in parts.items():
        shares[BOUNDS[name]] = shares.get(BOUNDS[name], 0.0) + seconds / total_s
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def advise(account: Account) -> Advice:
    """Return what to do about an account of time."""
    shares = bound_shares(account.split)
    if not shares:
        return Advice(bound=Bound.NOTHING, share=0.0, text="no time has gone anywhere yet")
    (bound, share), second = list(shares.items())[:2]
    if share < MOSTLY:
        text = f"mixed: {share:.0%} {bound}, {second[1]:.0%} {second[0]}; no one thing holds it up"
        return Advice(bound=Bound.MIXED, share=share, text=text)
    return Advice(
        bound=bound, share=share, text=f"{share:.0%} {bound}{_what_to_do(bound, account)}"
    )


def _what_to_do(bound: Bound, account: Account) -> str:
    match bound:
        case Bound.TOOLS:
            tools = [tool for tool in account.tools if not tool.is_sub_agent]
            most = f", {tools[0].tool} most of all" if len(tools) > 1 else ""
            return f"{most}: more concurrent jobs would fill the GPU; it is not the GPU"
        case Bound.GPU:
            return _about_gpu(account)
        case Bound.HOST:
            return _about_host(account.split)
        case Bound.PEOPLE:
            return ": it waited for approvals or was paused, and held no GPU meanwhile"
        case Bound.SUB_AGENTS:
            return ": its sub-agents took the time; their own reports say for what"
        case _:
            return ": LLM steps did not finish; muster show says why, muster doctor what is wrong"


def _about_gpu(account: Account) -> str:
    split, tokens = account.split, account.tokens
    waiting_s = split.backlog_s + split.line_s + split.engine_queue_s
    computing_s = split.prefill_s + split.decode_s
    lost = (tokens.attainable - tokens.cached) / tokens.prompt if tokens.prompt else 0.0
    if lost >= LOST_CACHE:
        return (
            f": {lost:.0%} of the prompts were computed again; a larger KV cache or fewer jobs"
            " at once would spare that"
        )
    if waiting_s >= MOSTLY * (waiting_s + computing_s):
        return ", most of it waiting for the engine: another GPU, or fewer jobs at once, would help"
    if split.prefill_s >= MOSTLY * computing_s:
        return ", most of it reading prompts: shorter prompts or a faster GPU would help"
    return ", most of it generating: shorter answers, a smaller model or a faster GPU would help"


def _about_host(split: Split) -> str:
    host = {name: getattr(split, name) for name, bound in BOUNDS.items() if bound is Bound.HOST}
    most = max(host, key=lambda name: host[name])
    match most:
        case "orchestration_s" | "other_s":
            what = "Temporal and the agent workers: muster doctor, more of them, or a faster server"
        case _:
            what = "the inference service's own CPU and its database: give them more"
    return f", {PARTS[most][0]} most of all: it is {what}; it is not the GPU"
