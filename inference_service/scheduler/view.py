"""A snapshot of the scheduler for people: what `GET /cohorts` shows. Plain numbers and texts."""

from __future__ import annotations

from dataclasses import dataclass

from inference_service.scheduler.kv_model import KVModel
from inference_service.scheduler.session import Session


@dataclass(frozen=True, slots=True)
class LeaseView:
    """A waiting session whose KV is kept. `returns_in_s` is the median of what is expected."""

    session: str
    tools: tuple[str, ...]
    tokens: int
    cached_tokens: int
    waited_s: float
    returns_in_s: float


@dataclass(frozen=True, slots=True)
class GapView:
    """What was learned of one tool: how long sessions stay away for it, and how many are out."""

    tool: str
    returned: int
    out: int
    p50_s: float
    p90_s: float


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """One moment of one scheduler.

    Steps: `ready`, `running`. Sessions: `acting` (tools in flight), `admitted`, of them `kept`;
    `cold` (no KV believed cached). Blocks: the `working_set` of what is kept or runs, shared ones
    counted once, and the `cold_room` left to sessions that are not kept, against the `watermark` of
    `num_blocks`. `disagreements` counts returns whose cached tokens were not what the model of the
    cache said, `disagreement_tokens` by how much in all. `yielded` leases have given way so far;
    `prewarm_hits` prewarms were of use: their session's next step found all of it cached.
    """

    ready: int
    running: int
    acting: int = 0
    cold: int = 0
    admitted: int = 0
    kept: int = 0
    working_set: int = 0
    watermark: int = 0
    cold_room: int = 0
    num_blocks: int = 0
    disagreements: int = 0
    disagreement_tokens: int = 0
    yielded: int = 0
    prewarm_hits: int = 0
    leases: tuple[LeaseView, ...] = ()
    gaps: tuple[GapView, ...] = ()


def lease_view(session: Session, kv: KVModel, returns_in_s: float, now: float) -> LeaseView:
    """Return what is to be seen of one lease."""
    return LeaseView(
        session=session.id,
        tools=session.tools,
        tokens=session.tokens,
        cached_tokens=kv.cached_tokens(session.chain),
        waited_s=now - session.away_since,
        returns_in_s=returns_in_s,
    )
