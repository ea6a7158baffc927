"""Refreshes and prewarms: requests of one token that keep or bring KV into the engine's cache.

The engine evicts by time of release, so the dead blocks of sessions that ended outlive those of one
that waits. Before a step allocates, each kept session whose blocks would be evicted by that is
touched: a request with its prefix to the last whole block and one token more puts the blocks at
the end of the queue. One touch is under way at a time, since concurrent ones evict each other.

A prewarm computes what was evicted of a session shortly before its tools are expected back, when
the engine has nothing else to do. Other steps go beside it; its own session's step waits for its
end, since it would compute the same. Where prewarms of a tool are not used, they stop.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from inference_service.scheduler.decision import Prewarm, Refresh
from inference_service.scheduler.gap import GapModel
from inference_service.scheduler.kv_model import KVModel
from inference_service.scheduler.rate import RateModel
from inference_service.scheduler.session import Session, State

MIN_PREWARMS = 5
MIN_HIT_SHARE = 0.5
"""After so many prewarms for a tool, fewer hits than this end them."""

MAX_RECORDS = 1_024
"""Tools of which it is known how prewarms went; the first known is forgotten first."""

WORTHWHILE_BLOCKS = 2
"""What is missing of a session for a prewarm to be worth a request."""

MIN_LOOK_S = 0.05
"""Time between two looks at an idle engine for a prewarm that falls due."""


@dataclass(slots=True)
class _Record:
    prewarms: int = 0
    hits: int = 0

    @property
    def pays(self) -> bool:
        return self.prewarms < MIN_PREWARMS or self.hits >= MIN_HIT_SHARE * self.prewarms


class Touches:
    """Chooses touches, one at a time, and notes which prewarms were of use."""

    def __init__(self, kv: KVModel, gaps: GapModel, rate: RateModel) -> None:
        self.under_way: Session | None = None
        self.prewarm_hits = 0
        """Prewarmed sessions whose next step found all of that cached."""
        self.next_look_s: float | None = None
        """When a prewarm may fall due, if nothing happens before."""
        self._kv = kv
        self._gaps = gaps
        self._rate = rate
        self._is_prewarm = False
        self._records: dict[str, _Record] = {}

    @property
    def is_refreshing(self) -> bool:
        """Whether a refresh is under way: steps wait for its end."""
        return self.under_way is not None and not self._is_prewarm

    def is_prewarming(self, session: Session) -> bool:
        """Whether a prewarm of this session is under way: its step waits for its end."""
        return self.under_way is session and self._is_prewarm

    def at_risk(
        self, sessions: dict[str, Session], for_session: Session, num_blocks: int
    ) -> Session | None:
        """Return a session to be refreshed before `for_session` takes so many blocks, or None.

        What a prewarm under way takes is counted too.
        """
        chain = for_session.chain
        if warmed := self.under_way:
            num_blocks += self._kv.missing_blocks(warmed.chain)
            chain = chain + warmed.chain
        if num_blocks + 1 >= self._kv.unheld_free(chain):
            return None  # something held goes, whichever of it is touched
        for holder in self._kv.at_risk(num_blocks + 1, chain):
            session = sessions[holder]
            idle = session is not for_session and session.state is not State.RUNNING
            if idle and session is not warmed and self._refreshable_tokens(session):
                return session
        return None

    def refresh(self, session: Session) -> Refresh:
        """Begin to refresh a session that is at risk."""
        tokens = self._refreshable_tokens(session)
        assert tokens and self.under_way is None, (session, self.under_way)
        self._begin(session)
        return Refresh(session.id, tokens + 1)

    def prewarm(self, away: Iterable[Session], room: int, now: float) -> Prewarm | None:
        """Return a touch of a session that is expected back about when it will be done, or None.

        `room`: blocks that nobody keeps and nothing runs in.
        """
        for session in away:
            blocks = self._kv.missing_blocks(session.chain)
            tokens = self._whole_tokens(session) + 1
            if blocks < WORTHWHILE_BLOCKS or blocks >= room:
                continue
            if not self._record(session.gap_key).pays:
                continue
            takes_s = self._rate.prefill_s(blocks * self._kv.block_size)
            waited_s = now - session.away_since
            soon = self._gaps.returns_within(session.gap_key, waited_s, 4 * takes_s, now)
            if soon < MIN_HIT_SHARE:
                left_s = self._gaps.remaining_s(session.gap_key, waited_s, now) - 4 * takes_s
                look_s = now + max(MIN_LOOK_S, left_s / 2)  # half: the estimate moves with time
                self.next_look_s = min(self.next_look_s or look_s, look_s)
                continue
            if any(self._kv.at_risk(blocks + 1, session.chain)):
                continue
            self._begin(session, is_prewarm=True)
            self._record(session.gap_key).prewarms += 1
            session.prewarmed_tokens = tokens - 1
            return Prewarm(session.id, tokens)
        return None

    def done(self, session: Session, cached_tokens: int) -> None:
        """Note a touch's end; -1: it has failed."""
        self.under_way = None
        session.is_touching = False
        if not session.chain:
            return
        if cached_tokens < 0:
            # What it has done is unknown. It is not asked for again: the step waits no longer.
            self._kv.touch(session.chain)
            return
        if self._is_prewarm:
            self._kv.correct(session.chain, session.prewarmed_tokens)
        else:
            self._kv.correct(session.chain, cached_tokens)
        self._kv.touch(session.chain)

    def came_back(self, session: Session, cached_tokens: int) -> None:
        """Note what a prewarmed session's next step found cached."""
        if session.prewarmed_tokens:
            is_hit = cached_tokens >= session.prewarmed_tokens
            self._record(session.gap_key).hits += is_hit
            self.prewarm_hits += is_hit
            session.prewarmed_tokens = 0

    def lost(self) -> None:
        """Note that the engine is gone, and the touch with it."""
        if self.under_way:
            self.under_way.is_touching = False
        self.under_way = None

    def _record(self, key: str) -> _Record:
        if key not in self._records and len(self._records) == MAX_RECORDS:
            del self._records[next(iter(self._records))]
        return self._records.setdefault(key, _Record())

    def _refreshable_tokens(self, session: Session) -> int:
        return min(self._kv.cached_tokens(session.chain), self._whole_tokens(session))

    def _whole_tokens(self, session: Session) -> int:
        """Return the tokens of a context's whole blocks, at least one token left over."""
        return (session.tokens - 1) // self._kv.block_size * self._kv.block_size

    def _begin(self, session: Session, *, is_prewarm: bool = False) -> None:
        self.under_way = session
        self.next_look_s = None
        self._is_prewarm = is_prewarm
        session.is_touching = True
