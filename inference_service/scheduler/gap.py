"""How long sessions stay away for their tools, learned from those that came back.

One histogram for each set of tools, in bins that double every second one. A session that is still
out counts as one that has not returned yet (a censored gap), so a tool that hangs is not taken for
one that returns soon.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise

from inference_service.scheduler.view import GapView

SHORTEST_S = 0.01
BINS_PER_OCTAVE = 2
EDGES = tuple(SHORTEST_S * 2 ** (n / BINS_PER_OCTAVE) for n in range(48))
"""Upper edges of the bins, in seconds: 10 ms to 1.4 days."""

PRIOR_WEIGHT = 2.0
"""Gaps that were never seen: they make the first estimates, until seen ones outnumber them."""
PRIOR_MEDIAN_S = 4.0
PRIOR_SPREAD = 1.5
"""Coding agents' gaps: 8 s at the median, 79 s at p90; a guess for a tool never seen."""

TYPICAL_OVER = 20
"""Gaps that the typical one is the mean of."""

PRIOR_NEVER = 0.05
"""Guess of the share of calls that never return: one that is out far beyond all others hangs."""

MAX_TOOLS = 512
"""Histograms kept; the one used longest ago goes first."""

FRESH_S = 0.25
STALE_S = 5.0
"""A survival curve is made anew when it is older than the first and a twentieth of what it stands
on has changed, or older than the second: making it costs a look at every session that is out."""


def _bin(gap_s: float) -> int:
    return bisect_right(EDGES, gap_s)


def _share_out(survival: list[float], gap_s: float) -> float:
    """Return P(gap > `gap_s`), with a straight line within a bin."""
    number = _bin(gap_s)
    if number >= len(EDGES):
        return survival[-1]
    lower = EDGES[number - 1] if number else 0.0
    before = survival[number - 1] if number else 1.0
    part = (gap_s - lower) / (EDGES[number] - lower)
    return before + part * (survival[number] - before)


def _normal_cdf(x: float) -> float:
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def _prior() -> list[float]:
    """Return a log-normal's weight in each bin, and beyond the last edge."""
    cdf = [_normal_cdf(math.log(edge / PRIOR_MEDIAN_S) / PRIOR_SPREAD) for edge in EDGES]
    bounds = [0.0, *(share * (1 - PRIOR_NEVER) for share in cdf), 1.0]
    return [PRIOR_WEIGHT * (b - a) for a, b in pairwise(bounds)]


_PRIOR = _prior()


class Gaps:
    """The gaps of one set of tools."""

    def __init__(self) -> None:
        self.returned = 0
        self.changes = 0
        """Departures and returns so far."""
        self._counts = [0.0] * len(_PRIOR)
        self._out: dict[str, float] = {}

    @property
    def out(self) -> int:
        """Sessions that are away now."""
        return len(self._out)

    def leave(self, session: str, now: float) -> None:
        """Note that a session went away."""
        self._out[session] = now
        self.changes += 1

    def come_back(self, session: str, now: float) -> float | None:
        """Note that it came back; return how long it was out, None if it was not."""
        since = self._out.pop(session, None)
        if since is None:
            return None
        self._counts[_bin(now - since)] += 1
        self.returned += 1
        self.changes += 1
        return now - since

    def give_up(self, session: str) -> None:
        """Forget a session that will not come back."""
        self._out.pop(session, None)

    def survival(self, now: float) -> list[float]:
        """Return P(gap > upper edge) of each bin, by Kaplan and Meier."""
        lost = [0] * len(_PRIOR)
        for since in self._out.values():
            lost[_bin(max(0.0, now - since))] += 1
        returned = [seen + prior for seen, prior in zip(self._counts, _PRIOR, strict=True)]
        at_risk = sum(returned) + sum(lost)
        share, survival = 1.0, []
        for ended, censored in zip(returned, lost, strict=True):
            share *= 1 - ended / at_risk if at_risk > 1e-9 else 0.0
            survival.append(max(share, 0.0))
            at_risk -= ended + censored
        return survival


class GapModel:
    """Learns and predicts gaps by the tools that were called."""

    def __init__(self) -> None:
        self._gaps: OrderedDict[str, Gaps] = OrderedDict()
        self._survival: dict[str, _Survival] = {}
        self.typical_s = PRIOR_MEDIAN_S
        """Mean of the last gaps of all tools; sessions that are still out are not in it."""

    def leave(self, session: str, tools: tuple[str, ...], now: float) -> str:
        """Note that a session went away for `tools`; return the key of their histogram."""
        key = "+".join(sorted(set(tools)))
        gaps = self._gaps.setdefault(key, Gaps())
        self._gaps.move_to_end(key)
        gaps.leave(session, now)
        if len(self._gaps) > MAX_TOOLS:
            dropped, _ = self._gaps.popitem(last=False)
            self._survival.pop(dropped, None)
        return key

    def come_back(self, session: str, key: str, now: float) -> None:
        """Note that a session came back from the tools of `key`."""
        if (gaps := self._gaps.get(key)) and (gap_s := gaps.come_back(session, now)) is not None:
            self.typical_s += (gap_s - self.typical_s) / TYPICAL_OVER

    def give_up(self, session: str, key: str) -> None:
        """Forget a session that will not come back."""
        if gaps := self._gaps.get(key):
            gaps.give_up(session)

    def returns_within(self, key: str, waited_s: float, window_s: float, now: float) -> float:
        """Return P(back within `window_s` | still out after `waited_s`)."""
        still_out = self._still_out(key, waited_s, now)
        if still_out < 1e-9:
            return 0.0
        later = self._still_out(key, waited_s + window_s, now)
        return 1.0 - later / still_out

    def remaining_s(self, key: str, waited_s: float, now: float, *, is_view: bool = False) -> float:
        """Return the median of the time until it is back; the longest known if it will hardly be.

        `is_view`: only a person asks; what is decided later does not depend on that.
        """
        survival = self._survival_of(key, now, is_view=is_view)
        half = 0.5 * _share_out(survival, waited_s)
        for edge, share in zip(EDGES, survival, strict=False):
            if edge > waited_s and share <= half:
                return edge - waited_s
        return max(EDGES[-1], waited_s)

    def views(self, now: float) -> tuple[GapView, ...]:
        """Return what was learned of each set of tools."""
        return tuple(
            GapView(
                tool=key,
                returned=gaps.returned,
                out=gaps.out,
                p50_s=self._quantile(key, 0.5, now),
                p90_s=self._quantile(key, 0.9, now),
            )
            for key, gaps in self._gaps.items()
        )

    def _quantile(self, key: str, share: float, now: float) -> float:
        curve = self._survival_of(key, now, is_view=True)
        for edge, survival in zip(EDGES, curve, strict=False):
            if survival <= 1 - share:
                return edge
        return EDGES[-1]

    def _still_out(self, key: str, gap_s: float, now: float) -> float:
        return _share_out(self._survival_of(key, now), gap_s)

    def _survival_of(self, key: str, now: float, *, is_view: bool = False) -> list[float]:
        known = self._survival.get(key)
        gaps = self._gaps.get(key) or Gaps()
        if known is None or known.is_stale(gaps, now):
            known = _Survival(now, gaps.changes, gaps.survival(now))
            if not is_view and key in self._gaps:
                self._survival[key] = known
        return known.curve


@dataclass(frozen=True, slots=True)
class _Survival:
    made_at: float
    changes: int
    curve: list[float]

    def is_stale(self, gaps: Gaps, now: float) -> bool:
        age_s = now - self.made_at
        news = gaps.changes - self.changes
        return age_s > STALE_S or (age_s > FRESH_S and news * 20 >= gaps.returned + gaps.out)
