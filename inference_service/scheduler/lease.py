"""Leases: which waiting sessions keep their KV, what that is worth, and who gives way.

A lease is soft: it never blocks an allocation, it is a wish that the refreshes of the shell make
come true. Its value is p x R: the chance that the session comes back at all soon, and the seconds
of prefill that its KV then saves. When room is needed, those expected back last give way first
(their blocks would stand idle longest), and among equals those admitted last, so that what was
begun first is finished first.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from inference_service.scheduler.gap import GapModel
from inference_service.scheduler.kv_model import KVModel
from inference_service.scheduler.rate import RateModel
from inference_service.scheduler.session import Session, State

LOSS_WINDOW_S = 300.0
"""A session that comes back later than this after yielding counts as no loss."""

MIN_RETURN_CHANCE = 0.05
"""A lease ends when the chance of a return within `LOSS_WINDOW_S` falls below this."""

MAX_CANDIDATES = 64
"""Leases that are looked at when room is needed: the youngest, and those away longest."""

PATROL = 64
"""Leases of sessions away for longer than `LOSS_WINDOW_S` that are looked at each time, in turn."""


@dataclass(frozen=True, slots=True)
class Yield:
    """Leases that would give way together, and what that would lose, in seconds of prefill."""

    sessions: tuple[Session, ...]
    blocks: int
    loss_s: float


class Leases:
    """The sessions whose KV is to be kept."""

    def __init__(self, kv: KVModel, gaps: GapModel, rate: RateModel) -> None:
        self._kv = kv
        self._gaps = gaps
        self._rate = rate
        self._held: dict[str, Session] = {}
        self._acting: dict[str, Session] = {}
        self._lately_away: OrderedDict[str, Session] = OrderedDict()
        """Those of them not known yet to be away for long."""
        self._long_away: OrderedDict[str, Session] = OrderedDict()
        """The others; who was looked at least recently comes first."""

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, session: Session) -> None:
        """Keep a session's KV, as it is now; again after each step."""
        self._kv.hold(session.id, session.chain)
        session.holds = True
        self._held[session.id] = session

    def release(self, session: Session) -> None:
        """Keep it no more."""
        if session.holds:
            self._kv.release(session.id, session.chain)
            session.holds = False
            del self._held[session.id]
            self.back(session)

    def away(self, session: Session) -> None:
        """Note that a session that holds has gone to its tools."""
        if session.holds and session.id not in self._acting:
            self._acting[session.id] = session
            self._lately_away[session.id] = session

    def back(self, session: Session) -> None:
        """Note that it is back."""
        self._acting.pop(session.id, None)
        self._lately_away.pop(session.id, None)
        self._long_away.pop(session.id, None)

    def remaining_s(self, session: Session, now: float, *, is_view: bool = False) -> float:
        """Return how long until the session's next step is expected, 0 if it is here."""
        if session.state is not State.ACTING:
            return 0.0
        waited_s = now - session.away_since
        return self._gaps.remaining_s(session.gap_key, waited_s, now, is_view=is_view)

    def loss_s(self, session: Session, now: float) -> float:
        """Return the seconds of prefill that yielding is expected to cost."""
        chance = 1.0
        if session.state is State.ACTING:
            waited_s = now - session.away_since
            chance = self._gaps.returns_within(session.gap_key, waited_s, LOSS_WINDOW_S, now)
        return chance * self._rate.prefill_s(self._kv.cached_tokens(session.chain))

    def next_return_s(self, now: float) -> float:
        """Return the expected time until a session that is kept comes back, if the engine idles."""
        away = islice(self._acting.values(), MAX_CANDIDATES)
        rate = sum(1 / max(self.remaining_s(session, now), 0.001) for session in away)
        return 1 / rate if rate else math.inf

    def to_yield(
        self,
        num_blocks: int,
        now: float,
        *,
        for_session: Session,
        after: int | None = None,
        of_all: bool = False,
    ) -> Yield | None:
        """Return leases that together give `num_blocks`, or None if they cannot.

        `after`: only sessions admitted after this one's place may give way. `of_all`: all leases
        are looked at, however many there are.
        """
        if after is not None and not any(self._admitted_after(after)):
            return None
        candidates = [
            session
            for session in (self._held.values() if of_all else self._candidates())
            if session is not for_session
            and session.state is not State.RUNNING
            and not session.is_touching
            and (after is None or (session.admitted or 0) > after)
        ]
        candidates.sort(key=lambda session: self._order(session, now))
        chosen: dict[str, Session] = {}
        blocks, loss_s = 0, 0.0
        # First those that give something by themselves, then those that only share.
        for sharing in (False, True):
            for session in candidates:
                if blocks >= num_blocks:
                    break
                if session.id in chosen:
                    continue
                freed = self._kv.released_blocks(
                    session.chain, session.id, chosen.keys(), for_session.chain
                )
                if freed or sharing:
                    chosen[session.id] = session
                    blocks += freed
                    loss_s += self.loss_s(session, now)
        return Yield(tuple(chosen.values()), blocks, loss_s) if blocks >= num_blocks else None

    def acting(self) -> list[Session]:
        """Return kept sessions whose tools are out, longest away first; at most a few."""
        return list(islice(self._acting.values(), MAX_CANDIDATES))

    def ended(self, now: float) -> list[Session]:
        """Return leases that are kept for nothing: their sessions will hardly come back.

        Some of the sessions that are away for long are looked at, other ones the next time.
        """
        while self._lately_away:
            session = next(iter(self._lately_away.values()))
            if now - session.away_since <= LOSS_WINDOW_S:
                break
            self._long_away[session.id] = self._lately_away.pop(session.id)
        found = []
        for session in list(islice(self._long_away.values(), PATROL)):
            self._long_away.move_to_end(session.id)
            waited_s = now - session.away_since
            chance = self._gaps.returns_within(session.gap_key, waited_s, LOSS_WINDOW_S, now)
            if chance < MIN_RETURN_CHANCE:
                found.append(session)
        return found

    def _admitted_after(self, place: int) -> Iterator[bool]:
        for session in islice(reversed(self._held.values()), MAX_CANDIDATES):
            yield (session.admitted or 0) > place

    def _candidates(self) -> list[Session]:
        youngest = islice(reversed(self._held.values()), MAX_CANDIDATES)
        longest_away = islice(self._acting.values(), MAX_CANDIDATES)
        return list({session.id: session for session in (*youngest, *longest_away)}.values())

    def _order(self, session: Session, now: float) -> tuple[int, int]:
        """Lower yields first: expected back last (to a factor of four), then admitted last."""
        remaining = self.remaining_s(session, now)
        return (-round(math.log(max(remaining, 0.25), 4)), -(session.admitted or 0))
