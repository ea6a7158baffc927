"""How long a job waited for people: for approval of its calls, or to be resumed.

A job tells by the search attribute `MusterWaitingFor` what it waits for; each change is an event.
While something else of the job runs beside (a call that needs no approval), it is not waiting.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from temporalio.api.history.v1 import HistoryEvent

from contracts.name import SEARCH_WAITING_FOR, SESSION_HINT
from muster.history import Activity, covered_s, time_ns


class PeopleWait:
    """The spans in which a job waited for people, as its runs tell one after the other."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []
        self._since_ns: int | None = None

    def follow(self, events: Sequence[HistoryEvent]) -> None:
        """Take in the history of the next run; a wait goes on over a roll-over."""
        for event in events:
            waits = _waits(event)
            if waits and self._since_ns is None:
                self._since_ns = time_ns(event)
            elif waits is False and self._since_ns is not None:
                self._spans.append((self._since_ns, time_ns(event)))
                self._since_ns = None

    def alone_s(self, found: Iterable[Activity], end_ns: int) -> float:
        """Return the seconds in which the job waited for people and had nothing else in flight."""
        busy = [
            (each.scheduled_ns, end_ns if each.closed_ns is None else each.closed_ns)
            for each in found
            if each.name != SESSION_HINT
        ]
        still_open = [] if self._since_ns is None else [(self._since_ns, end_ns)]
        return max(0.0, covered_s([*self._spans, *still_open, *busy]) - covered_s(busy))


def _waits(event: HistoryEvent) -> bool | None:
    """Return whether the job waits for people from this event on; None if it does not say."""
    started = event.workflow_execution_started_event_attributes.search_attributes
    upserted = event.upsert_workflow_search_attributes_event_attributes.search_attributes
    for attributes in (started, upserted):
        if SEARCH_WAITING_FOR in attributes.indexed_fields:
            try:
                return bool(json.loads(attributes.indexed_fields[SEARCH_WAITING_FOR].data))
            except ValueError:  # removed: no value
                return False
    return None
