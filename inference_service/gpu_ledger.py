"""The GPU ledger: what an engine did with every second of its wall time. No clock: `now` is given.

Theory of operation. From the start to now each second is in one place:

- *Idle*: the engine has no request. With steps in line it is `idle_ready_s`, else `idle_s`.
- *Gap*: a step was handed over, and the engine does not compute: it is on its way in, or between
  two engine steps.
- *Computing*: the duration of an engine step, as the engine tells it. The tokens it computed share
  that time: tokens of prompts are prefill, all others decode.

Computed time is given to the requests in the engine that are in that phase, in equal parts, and
*settled* when the fate of the request is known: what was kept is useful; a prompt's part that its
session had computed before is recompute; what was thrown away (samples that were not the form asked
for, cancelled or lost steps) is waste. Touches are recompute altogether: they compute nothing new.
Until then it is `pending_s`, which is no more than what is in the engine now.

An engine that tells nothing of its steps (`tells_steps=False`) computes whenever it has a request,
and its requests share that time by their phases: there are no gaps then.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum, auto

from inference_service.engine.protocol import EngineStepStats


@dataclass(frozen=True, slots=True)
class GPUAccount:
    """Seconds of one engine's wall time since its start, and where they went; the parts sum to it.

    `useful_prefill_s`, `useful_decode_s`: for results that were kept. `recompute_s`: prompts that
    had been computed before, touches among them. `waste_s`: for nothing. `gap_s`: work was in the
    engine, and nothing computed. `idle_ready_s`: no work in the engine, steps in line. `idle_s`:
    nothing to do. `pending_s`: computed for what is in the engine now.
    """

    wall_s: float = 0.0
    useful_prefill_s: float = 0.0
    useful_decode_s: float = 0.0
    recompute_s: float = 0.0
    waste_s: float = 0.0
    gap_s: float = 0.0
    idle_ready_s: float = 0.0
    idle_s: float = 0.0
    pending_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds in which the engine computed."""
        return (
            self.useful_prefill_s
            + self.useful_decode_s
            + self.recompute_s
            + self.waste_s
            + self.pending_s
        )

    @property
    def opportunity(self) -> float:
        """Share of the wall time, 0 to 1, that better serving could have used."""
        lost_s = self.recompute_s + self.waste_s + self.idle_ready_s + self.gap_s
        return lost_s / self.wall_s if self.wall_s else 0.0

    def since(self, earlier: GPUAccount) -> GPUAccount:
        """Return the account of the time from `earlier` to this one."""
        return GPUAccount(
            **{
                field.name: getattr(self, field.name) - getattr(earlier, field.name)
                for field in fields(self)
            }
        )


class Fate(Enum):
    """What became of a request."""

    KEPT = auto()
    """Its answer is a committed step's."""
    WASTED = auto()
    """Nobody has anything of it."""
    TOUCH = auto()
    """It was made for the cache."""


class _Phase(Enum):
    PREFILL = auto()
    DECODE = auto()
    ENDED = auto()


@dataclass(slots=True)
class _Request:
    """A request whose time is not settled. `num_cached` is None while nobody has told it."""

    num_prompt: int
    num_known: int
    num_cached: int | None = None
    phase: _Phase = _Phase.PREFILL
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def again(self) -> float:
        """The share of what was computed of the prompt that had been computed before."""
        if self.num_cached is None or self.num_cached >= self.num_prompt:
            return 0.0
        return max(0, self.num_known - self.num_cached) / (self.num_prompt - self.num_cached)


class GPULedger:
    """Keeps the account of one engine, from `now` on; `now` never goes back."""

    def __init__(self, now: float, *, tells_steps: bool = True) -> None:
        self._tells_steps = tells_steps
        self._began = self._mark = now
        self._settled = GPUAccount()
        self._requests: dict[str, _Request] = {}
        self._num_inside = 0
        self._is_ready = False
        self._is_entering = False

    def line(self, *, is_ready: bool, is_entering: bool, now: float) -> None:
        """Note whether steps wait in line, and whether some are on their way into the engine."""
        if (is_ready, is_entering) != (self._is_ready, self._is_entering):
            self._pass(now)
            self._is_ready, self._is_entering = is_ready, is_entering

    def entered(self, request: str, *, num_prompt: int, num_known: int, now: float) -> None:
        """Note a request; `num_known` of its prompt's first tokens were computed before."""
        assert request not in self._requests, request
        self._pass(now)
        self._requests[request] = _Request(num_prompt, min(num_known, num_prompt))
        self._num_inside += 1

    def stepped(self, step: EngineStepStats, now: float) -> None:
        """Note the end of an engine step; called before the tokens that it sampled are."""
        span_s = max(0.0, now - self._mark)
        self._mark += span_s
        computed_s = min(step.duration_s, span_s)
        if self._num_inside:
            self._add(gap_s=span_s - computed_s)
        else:
            self._lose_idle(span_s - computed_s)
        tokens = step.prefill_tokens + step.decode_tokens
        if not tokens:
            self._add(gap_s=computed_s)
            return
        again = max(0, step.decode_tokens - step.decode_requests)
        self._add(recompute_s=computed_s * again / tokens)
        self._share(_Phase.PREFILL, computed_s * step.prefill_tokens / tokens)
        self._share(_Phase.DECODE, computed_s * (step.decode_tokens - again) / tokens)

    def first_token(self, request: str, now: float) -> None:
        """Note that a request's prompt is computed."""
        self._pass(now)
        self._requests[request].phase = _Phase.DECODE

    def cached(self, request: str, num_cached: int) -> None:
        """Note how much of a request's prompt was in the prefix cache, once that is told."""
        self._requests[request].num_cached = num_cached

    def ended(self, request: str, now: float) -> None:
        """Note that a request has left the engine; its time waits to be settled."""
        self._pass(now)
        entry = self._requests[request]
        assert entry.phase is not _Phase.ENDED, request
        entry.phase = _Phase.ENDED
        self._num_inside -= 1
        if not self._num_inside and now > self._mark:
            self._add(gap_s=now - self._mark)
            self._mark = now

    def settle(self, request: str, fate: Fate) -> None:
        """Say what became of a request that has ended."""
        entry = self._requests.pop(request)
        assert entry.phase is _Phase.ENDED, request
        spent_s = entry.prefill_s + entry.decode_s
        match fate:
            case Fate.KEPT:
                again_s = entry.prefill_s * entry.again
                self._add(
                    useful_prefill_s=entry.prefill_s - again_s,
                    useful_decode_s=entry.decode_s,
                    recompute_s=again_s,
                )
            case Fate.WASTED:
                self._add(waste_s=spent_s)
            case Fate.TOUCH:
                self._add(recompute_s=spent_s)

    def account(self, now: float) -> GPUAccount:
        """Return where the wall time went until `now`."""
        self._pass(now)
        pending_s = sum(entry.prefill_s + entry.decode_s for entry in self._requests.values())
        open_s = max(0.0, now - self._mark)
        settled = replace(self._settled, wall_s=now - self._began, pending_s=pending_s)
        # An engine step in progress is told at its end; until then its time is on its way.
        return replace(settled, pending_s=settled.pending_s + open_s)

    def _pass(self, now: float) -> None:
        """Account for the time since the last mark, where no engine step can tell of it."""
        span_s = now - self._mark
        if span_s <= 0:
            return
        if not self._num_inside:
            self._mark = now
            self._lose_idle(span_s)
        elif not self._tells_steps:
            self._mark = now
            phases = [entry.phase for entry in self._requests.values()]
            prefill, decode = phases.count(_Phase.PREFILL), phases.count(_Phase.DECODE)
            self._share(_Phase.PREFILL, span_s * prefill / (prefill + decode))
            self._share(_Phase.DECODE, span_s * decode / (prefill + decode))

    def _lose_idle(self, span_s: float) -> None:
        if self._is_ready:
            self._add(idle_ready_s=span_s)
        elif self._is_entering:
            self._add(gap_s=span_s)
        else:
            self._add(idle_s=span_s)

    def _share(self, phase: _Phase, span_s: float) -> None:
        """Give computed time to the requests in that phase, or to any that are inside."""
        inside = [entry for entry in self._requests.values() if entry.phase is not _Phase.ENDED]
        having = [entry for entry in inside if entry.phase is phase] or inside
        if not having:
            self._add(waste_s=span_s)  # for a request that was aborted in this engine step
        for entry in having:
            if phase is _Phase.PREFILL:
                entry.prefill_s += span_s / len(having)
            else:
                entry.decode_s += span_s / len(having)

    def _add(self, **spans_s: float) -> None:
        settled = self._settled
        self._settled = replace(
            settled, **{name: getattr(settled, name) + span for name, span in spans_s.items()}
        )
