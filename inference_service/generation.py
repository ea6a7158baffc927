"""One running LLM step: owned by its step id, not by any attempt that waits for it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum, auto

from contracts.error import MusterError
from contracts.llm_step import LLMStepInput, LLMStepResult, StepPhase, StepTiming, Usage
from inference_service.leaf import Leaf


class StopCause(StrEnum):
    """Why a generation was told to stop before its end."""

    CANCELLED = auto()
    """Its job wants it no more."""
    ABANDONED = auto()
    """No attempt waits for it any more, but its job may ask again."""
    DRAINED = auto()
    """The replica goes away."""
    STALE = auto()
    """The scheduler gave it up: nobody would want its result any more."""
    STUCK = auto()
    """The engine that ran it makes no progress."""


@dataclass(eq=False)
class Generation:
    """What the service knows of a running step.

    `attempts` holds the task tokens that wait for it. `usage` counts this epoch; tokens of samples
    that were not kept stand under `wasted_tokens`. Times are seconds of one monotonic clock. `leaf`
    is the session it continues, from ready on.
    """

    step: LLMStepInput
    digest: str
    created_s: float
    attempts: set[bytes] = field(default_factory=set)
    epoch: int = 0
    past: Usage = field(default_factory=Usage)
    failures: int = 0
    phase: StepPhase = StepPhase.QUEUED
    usage: Usage = field(default_factory=Usage)
    ready_s: float = 0.0
    dispatched_s: float = 0.0
    first_token_s: float = 0.0
    is_cached_known: bool = False
    """Whether the engine said with the first token how much of the prompt was cached."""
    late_cached_tokens: int = 0
    """What the engine said at the end of the first sample, where it says so only there."""
    cohort_size: int = 0
    known_tokens: int = 0
    """How many of the prompt's first tokens the session had computed before."""
    samples: list[str] = field(default_factory=list[str])
    """The engine requests made for it, the last one's answer being the step's, if any."""
    sampled: array[int] = field(default_factory=lambda: array("i"))
    """What the last of them has sampled so far."""
    leaf: Leaf | None = None
    dispatched: asyncio.Event = field(default_factory=asyncio.Event)
    rejection: MusterError | None = None
    stop_cause: StopCause | None = None
    _task: asyncio.Task[LLMStepResult] | None = None
    _interruptible: bool = False

    @property
    def step_id(self) -> str:
        """The step's id, the same over all attempts."""
        return self.step.step_id

    @property
    def task(self) -> asyncio.Task[LLMStepResult]:
        """The task that generates; it ends with the step's result or one of our errors."""
        assert self._task is not None
        return self._task

    def begin(self, task: asyncio.Task[LLMStepResult]) -> None:
        """Say which task runs this generation."""
        assert self._task is None
        self._task = task

    def claimed(self, epoch: int, failures: int, past: Usage) -> None:
        """Note what the ledger says of the step: this epoch, failures and usage before it."""
        self.epoch, self.failures, self.past = epoch, failures, past

    def timing_so_far(self, now: float) -> StepTiming:
        """Return where the time of a step that never finished went, up to `now`.

        The engine has not said how it spent its part: until the first token it counts as prefill.
        """
        ready_s = self.ready_s or now
        dispatched_s = self.dispatched_s or now
        first_token_s = self.first_token_s or now
        return StepTiming(
            host_pre_s=ready_s - self.created_s,
            ready_wait_s=dispatched_s - ready_s,
            prefill_s=first_token_s - dispatched_s,
            decode_s=now - first_token_s,
        )

    def interrupt(self) -> None:
        """Break off waiting or generating; a claim or a commit in progress is let finish."""
        if self._interruptible:
            self._interruptible = False
            self.task.cancel()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Mark the part of the task that `interrupt` may break off, with `InterruptedStepError`."""
        if self.stop_cause:
            raise InterruptedStepError
        self._interruptible = True
        try:
            yield
        except asyncio.CancelledError:
            if not self.stop_cause:
                raise
            self.task.uncancel()
            raise InterruptedStepError from None
        finally:
            self._interruptible = False


class InterruptedStepError(Exception):
    """The generation was told to stop early; `Generation.stop_cause` says why."""
