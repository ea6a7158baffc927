"""Tool groups as a setting writes them: `crm=5/s x4, mail=30/m, slow=x2`.

A group has a task queue of its own. Its rate is what the server hands out to all workers together;
how many calls run at once is what one worker takes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from contracts.agent import NAME_PATTERN

MAX_GROUPS = 64
"""Each is a task queue that every tool worker polls."""

MAX_RATE_PER_S = 10_000.0
"""More than one Temporal server hands out."""

MIN_RATE_PER_S = 1 / 3_600
"""One call an hour; a call waits no longer than its `queue_timeout`, so less starves."""

MAX_AT_ONCE = 10_000
"""Calls of one group that one worker runs at once."""

_UNITS_S = {"s": 1, "m": 60, "h": 3_600}
_RATE = re.compile(r"[0-9]+(?:\.[0-9]+)?/[smh]")
_AT_ONCE = re.compile(r"x([0-9]{1,9})")
_EXAMPLE = "write groups as in crm=5/s x4, mail=30/m, slow=x2"


@dataclass(frozen=True, slots=True)
class ToolGroup:
    """The limits of one group of tools; None where there is none of that kind."""

    rate: str | None = None
    """As it was written: `5/s`, `30/m`."""
    at_once: int | None = None
    """Calls that one worker runs at once; else as many as of other tools."""

    @property
    def rate_per_s(self) -> float | None:
        """Attempts that the server hands out in a second, to all workers together."""
        if self.rate is None:
            return None
        count, _, unit = self.rate.partition("/")
        return float(count) / _UNITS_S[unit]

    @property
    def text(self) -> str:
        """The limits as the setting writes them."""
        at_once = f"x{self.at_once}" if self.at_once else None
        return " ".join(part for part in (self.rate, at_once) if part)


def parse_groups(text: str) -> dict[str, ToolGroup]:
    """Return the groups that a setting names; raises ValueError with the part that is wrong."""
    groups: dict[str, ToolGroup] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, given, limits = (each.strip() for each in part.partition("="))
        if not re.match(NAME_PATTERN, name):
            raise ValueError(
                f"{name!r} is no name of a group: letters, digits, `_` and `-`, at most 64, "
                f"a letter first; {_EXAMPLE}"
            )
        if name in groups:
            raise ValueError(f"group {name!r} stands there twice")
        if given and not limits:
            raise ValueError(f"group {name!r} has `=` and no limit after it; {_EXAMPLE}")
        groups[name] = _group(name, limits.split())
    if len(groups) > MAX_GROUPS:
        raise ValueError(f"there are {len(groups)} groups, the limit is {MAX_GROUPS}")
    return groups


def written(groups: Mapping[str, ToolGroup]) -> str:
    """Return groups as a setting writes them."""
    return ", ".join(
        f"{name}={group.text}" if group.text else name for name, group in groups.items()
    )


def _group(name: str, limits: list[str]) -> ToolGroup:
    rate: str | None = None
    at_once: int | None = None
    for limit in limits:
        if _RATE.fullmatch(limit) and rate is None:
            rate = limit
        elif (found := _AT_ONCE.fullmatch(limit)) and at_once is None:
            at_once = int(found[1])
        else:
            raise ValueError(
                f"group {name!r}: {limit!r} is no limit, or the second of its kind; {_EXAMPLE}"
            )
    group = ToolGroup(rate, at_once)
    per_s = group.rate_per_s
    if per_s is not None and not (
        math.isclose(per_s, MIN_RATE_PER_S) or MIN_RATE_PER_S <= per_s <= MAX_RATE_PER_S
    ):
        raise ValueError(
            f"group {name!r}: the rate {rate} should be from 1/h to {MAX_RATE_PER_S:.0f}/s"
        )
    if at_once is not None and not 1 <= at_once <= MAX_AT_ONCE:
        raise ValueError(f"group {name!r}: x{at_once} should be from x1 to x{MAX_AT_ONCE}")
    return group
