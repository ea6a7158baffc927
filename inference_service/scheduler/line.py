"""The order of waiting steps, and who has been overtaken for too long.

Order: priority class (speculative work last), deadlines before none, continuations before new
sessions; then continuations by their session's admission, new sessions fairly between tenants and
within a tenant by earliest deadline, least attained service of the job, fewest unfinished members
of the fan-out group, arrival.

Overtaking: a step is overtaken when a session that arrived after it is admitted before it is
dispatched. Steps that wait in plain order are not overtaken, however long the line.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from inference_service.scheduler.event import FanOut
from inference_service.scheduler.session import Kind, Step

MAX_GROUPS = 10_000
MAX_TENANTS = 10_000
"""Groups and tenants that are remembered; the one heard of least recently is forgotten."""

_Entry = tuple[tuple[float, ...], str]


@dataclass(slots=True)
class _Tenant:
    """The waiting new sessions of one tenant in one class, in order."""

    name: str
    entries: list[_Entry] = field(default_factory=list[_Entry])


class Line:
    """Steps that are READY."""

    def __init__(self, tenant_weights: Mapping[str, float]) -> None:
        self.queued_tokens = 0
        """Prompt tokens of new sessions that wait."""
        self.new_steps = 0
        """Steps of new sessions that wait."""
        self._weights = tenant_weights
        self._steps: dict[str, Step] = {}
        self._continuations: dict[Kind, list[_Entry]] = {}
        self._new: dict[Kind, dict[str, _Tenant]] = {}
        self._service: dict[str, float] = {}
        self._virtual = 0.0
        self._groups: dict[str, int] = {}
        self._overtakers: list[int] = []
        self._overtaken_at: list[float] = []
        self._expiries: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, step_id: str) -> bool:
        return step_id in self._steps

    def get(self, step_id: str) -> Step | None:
        """Return a waiting step, or None."""
        return self._steps.get(step_id)

    def add(self, step: Step) -> None:
        """Put a step into its place."""
        ready = step.ready
        self._steps[step.id] = step
        deadline_s = math.inf if ready.deadline_s is None else ready.deadline_s
        is_new = step.session.admitted is None
        step.kind = (ready.is_speculative, ready.priority, ready.deadline_s is None, is_new)
        if step.session.admitted is not None:
            step.key = (deadline_s, step.session.admitted, step.arrival)
            entries = self._continuations.setdefault(step.kind, [])
        else:
            attained = math.frexp(ready.attained_s)[1] if ready.attained_s > 0 else -1_000
            step.key = (deadline_s, attained, self._unfinished(ready.fan_out), step.arrival)
            entries = self._tenant(step).entries
            self.queued_tokens += ready.prompt_tokens
            self.new_steps += 1
        insort(entries, (step.key, step.id))
        expiry = _expiry_s(step)
        if expiry < math.inf:
            heapq.heappush(self._expiries, (expiry, step.id))
            if len(self._expiries) > 2 * len(self._steps) + 64:
                self._expiries = [entry for entry in self._expiries if entry[1] in self._steps]
                heapq.heapify(self._expiries)

    def remove(self, step: Step) -> None:
        """Take a step out, wherever it goes."""
        del self._steps[step.id]
        is_new = step.kind[3]
        if is_new:
            entries = self._new[step.kind][step.ready.tenant].entries
            self.queued_tokens -= step.ready.prompt_tokens
            self.new_steps -= 1
        else:
            entries = self._continuations[step.kind]
        del entries[bisect_left(entries, (step.key, step.id))]
        if not entries and is_new:
            del self._new[step.kind][step.ready.tenant]
        elif not entries:
            del self._continuations[step.kind]
        if not self._steps:
            self._overtakers.clear()
            self._overtaken_at.clear()

    def charge(self, tenant: str, num_tokens: int, *, is_first: bool) -> None:
        """Count tokens that are computed for a tenant; `is_first`: for a session that begins."""
        weight = self._weights.get(tenant, 1.0)
        start = max(self._service.pop(tenant, 0.0), self._virtual)
        if is_first:
            self._virtual = start
        self._service[tenant] = start + num_tokens / weight
        if len(self._service) > MAX_TENANTS:
            del self._service[next(iter(self._service))]

    def began(self, step: Step, now: float) -> None:
        """Note that a session has begun with this step, and whom it has overtaken."""
        self._forget_overtakers()
        if not self._overtakers or step.arrival > self._overtakers[-1]:
            self._overtakers.append(step.arrival)
            self._overtaken_at.append(now)

    def _forget_overtakers(self) -> None:
        """Forget those that arrived before all that waits: nobody's time counts from them."""
        eldest = next(iter(self._steps.values()), None)
        passed = bisect_right(self._overtakers, eldest.arrival) if eldest else 0
        del self._overtakers[:passed], self._overtaken_at[:passed]

    def first(self, limit: int) -> list[Step]:
        """Return up to `limit` continuations and as many new sessions, in the order they should go.

        Counted apart, so that new sessions of a better class never hide a continuation.
        """
        found: list[Step] = []
        left = {True: limit, False: limit}
        for kind in self._kinds():
            some = list(islice(self._of_kind(kind), left[kind[3]]))
            left[kind[3]] -= len(some)
            found += some
        return found

    def oldest_overtaken(self) -> tuple[Step, float] | None:
        """Return the waiting step that was overtaken first, and when that was."""
        for step in self._steps.values():
            if not step.ready.is_speculative:
                index = bisect_right(self._overtakers, step.arrival)
                if index < len(self._overtakers):
                    return step, self._overtaken_at[index]
                return None
        return None

    def expired(self, now: float) -> list[Step]:
        """Return waiting steps whose deadline or time to live is over."""
        found = []
        while self._expiries and self._expiries[0][0] <= now:
            _, step_id = heapq.heappop(self._expiries)
            # One that has come back under its id may have more time now.
            if (step := self._steps.get(step_id)) and _expiry_s(step) <= now and step not in found:
                found.append(step)
        return found

    def next_expiry(self) -> float | None:
        """Return the earliest time at which `expired` may return something."""
        while self._expiries and self._expiries[0][1] not in self._steps:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def place(self, step_id: str) -> int | None:
        """Return how many steps go before this one, or None if it does not wait."""
        if step_id not in self._steps:
            return None
        return next(place for place, step in enumerate(self._in_order()) if step.id == step_id)

    def speculative(self) -> list[Step]:
        """Return the waiting speculative steps."""
        return [step for step in self._steps.values() if step.ready.is_speculative]

    def of_group(self, group: str) -> list[Step]:
        """Return the waiting steps of a fan-out group."""
        return [
            step
            for step in self._steps.values()
            if step.ready.fan_out and step.ready.fan_out.group == group
        ]

    def member_finished(self, fan_out: FanOut | None) -> None:
        """Note that a member of a group has finished."""
        if fan_out:
            finished = self._groups.pop(fan_out.group, 0) + 1
            if finished < fan_out.size:
                self._groups[fan_out.group] = finished
            if len(self._groups) > MAX_GROUPS:
                del self._groups[next(iter(self._groups))]

    def group_resolved(self, group: str) -> None:
        """Forget a group."""
        self._groups.pop(group, None)

    def _unfinished(self, fan_out: FanOut | None) -> int:
        return fan_out.size - self._groups.get(fan_out.group, 0) if fan_out else 1

    def _tenant(self, step: Step) -> _Tenant:
        tenants = self._new.setdefault(step.kind, {})
        name = step.ready.tenant
        if name not in tenants:
            tenants[name] = _Tenant(name)
        return tenants[name]

    def _kinds(self) -> list[Kind]:
        return sorted({*self._continuations, *self._new})

    def _of_kind(self, kind: Kind) -> Iterator[Step]:
        if kind[3]:
            yield from self._fairly(list(self._new[kind].values()))
        else:
            for _, step_id in self._continuations[kind]:
                yield self._steps[step_id]

    def _in_order(self) -> Iterator[Step]:
        for kind in self._kinds():
            yield from self._of_kind(kind)

    def _fairly(self, tenants: list[_Tenant]) -> Iterator[Step]:
        """Yield the tenants' steps by weighted service: what each has had, and what is yielded."""
        heap = [
            (max(self._service.get(tenant.name, 0.0), self._virtual), n, 0)
            for n, tenant in enumerate(tenants)
        ]
        heapq.heapify(heap)
        while heap:
            service, n, index = heap[0]
            entries = tenants[n].entries
            step = self._steps[entries[index][1]]
            yield step
            if index + 1 == len(entries):
                heapq.heappop(heap)
            else:
                weight = self._weights.get(tenants[n].name, 1.0)
                service += step.ready.prompt_tokens / weight
                heapq.heapreplace(heap, (service, n, index + 1))


def _expiry_s(step: Step) -> float:
    """Return when a step is of no use any more."""
    times = (step.ready.deadline_s, step.ready.expires_s)
    return min((time_s for time_s in times if time_s is not None), default=math.inf)
