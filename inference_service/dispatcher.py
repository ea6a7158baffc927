"""The scheduler's shell: tells it what happens and carries out what it decides.

Events of one turn of the event loop are scheduled together: that is how cohorts form.

Of sessions it tells what it sees: a committed step with tool calls means that the session is out
for these tools, one without that it has ended; so does a failure for good. What only the job's
workflow knows comes as a hint. Waiting sessions are watched in the engine's prefix cache.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from contracts.error import LimitExceededError
from contracts.llm_step import SessionState
from contracts.message import Message
from inference_service.cache_watch import CacheWatch
from inference_service.engine.protocol import Capability, Engine
from inference_service.failure import StaleStepError
from inference_service.generation import Generation, StopCause
from inference_service.gpu_ledger import Fate, GPULedger
from inference_service.leaf import Leaf, Leaves
from inference_service.scheduler.decision import Abort, Dispatch, Prewarm, Refresh, Reject, Shed
from inference_service.scheduler.event import (
    EngineLost,
    Event,
    FirstToken,
    KVEvicted,
    SessionEnded,
    SessionIdle,
    StepCancelled,
    StepFailed,
    StepFinished,
    ToolsStarted,
    TouchDone,
)
from inference_service.scheduler.protocol import IllegalEventError, Scheduler
from inference_service.scheduler.view import SchedulerView
from inference_service.session import Prompt
from inference_service.step_event import step_ready
from inference_service.touch_request import FAILED, Touches

log = logging.getLogger(__name__)

SHOWN_COHORTS = 20
"""Cohorts remembered for people."""

MIN_PAUSE_S = 0.001
"""The scheduler is not called more often than this for the sake of time alone."""


@dataclass(frozen=True, slots=True)
class Cohort:
    """Steps that went to the engine together, at `dispatched_s` of the monotonic clock."""

    dispatched_s: float
    step_ids: tuple[str, ...]


@dataclass(slots=True)
class Tally:
    """What was dispatched and came back since the start."""

    cohorts: int = 0
    steps: int = 0
    shed: int = 0
    refused_events: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Dispatcher:
    """Runs one scheduler and one engine on one event loop.

    `on_fault` is called if the scheduler breaks: it is called no more, and nothing goes on.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Engine,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_fault: Callable[[str], object] = log.error,
    ) -> None:
        self.now = clock
        self.on_fault = on_fault
        self.tally = Tally()
        self.last_cohorts: deque[Cohort] = deque(maxlen=SHOWN_COHORTS)
        self.gpu = GPULedger(clock(), tells_steps=Capability.STEPS in engine.capabilities)
        engine.on_step = lambda step: self.gpu.stepped(step, self.now())
        self.touches = Touches(engine, self._touched, self.gpu, clock)
        self.last_output_s = clock()
        """When the engine last gave a token, or was given its first work after a pause."""
        self._scheduler = scheduler
        self._engine = engine
        self._leaves = Leaves()
        self._known: dict[str, Generation] = {}
        self._schedule_is_due = False
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._window_changed = asyncio.Event()
        self._watch = CacheWatch(engine.cache, self._note_eviction)

    def ready(self, generation: Generation, prompt: Prompt) -> None:
        """Tell that the step can go to the engine; `generation.dispatched` is set when it may."""
        generation.ready_s = self.now()
        generation.leaf = leaf = self._leaves.take(generation.step, prompt)
        generation.known_tokens = prompt.kept
        self._tell(step_ready(generation, leaf, self._watch.ready(leaf, prompt)))
        self._known[generation.step_id] = generation
        for dropped in self._leaves.excess():
            self._end(dropped)

    def first_token(self, generation: Generation, cached_tokens: int | None) -> None:
        """Tell that the prompt is computed, but for `cached_tokens` (None: told at the end)."""
        if generation.step_id in self._known and not generation.first_token_s:
            assert generation.leaf is not None
            generation.first_token_s = self.now()
            self.tally.prompt_tokens += generation.leaf.growing[-1].end
            self.tally.cached_tokens += cached_tokens or 0
            generation.is_cached_known = cached_tokens is not None
            self._tell(FirstToken(generation.step_id, cached_tokens))

    def finished(self, generation: Generation, token_ids: array[int]) -> None:
        """Tell that the step's seat is free; `token_ids` is its whole context, answer included."""
        if self._known.pop(generation.step_id, None):
            assert generation.leaf is not None
            node = self._leaves.sampled(generation.leaf, token_ids)
            cached_tokens = None if generation.is_cached_known else self._cached_late(generation)
            self._tell(StepFinished(generation.step_id, node, cached_tokens))

    def _cached_late(self, generation: Generation) -> int | None:
        """Return what a server that tells it last has found cached; None if it does not tell."""
        if Capability.CACHED_TOKENS not in self._engine.capabilities:
            return None
        self.tally.cached_tokens += generation.late_cached_tokens
        return generation.late_cached_tokens

    def failed(self, generation: Generation) -> None:
        """Tell that the step has left the line or the engine without a result."""
        if self._known.pop(generation.step_id, None):
            self._waits_no_more(generation)
            is_dispatched = generation.dispatched.is_set()
            kind = StepFailed if is_dispatched else StepCancelled
            self._note(kind(generation.step_id))

    def committed(self, generation: Generation, message: Message) -> None:
        """Tell what the session of a committed step does now."""
        leaf = generation.leaf
        assert leaf is not None
        self._leaves.grow(leaf)
        if message.tool_calls and not leaf.is_over:
            self._note(ToolsStarted(leaf.session, tuple(call.tool for call in message.tool_calls)))
            self._watch.acting(leaf)
        elif generation.step.output.may_answer or leaf.is_over:
            self._end(leaf)

    def gave_up(self, generation: Generation, *, for_good: bool) -> None:
        """Tell, after the step has left, that it was not committed; `for_good`: never will be."""
        leaf = generation.leaf or self._leaves.find(generation.step)
        if leaf is None or leaf.step not in (None, generation.step_id):
            return
        is_lost = leaf.is_sampled
        if leaf.step is not None:
            self._watch.end(leaf.session)
        self._leaves.release(leaf)
        if for_good or is_lost or leaf.is_over:
            self._end(leaf)

    def settle(self, generation: Generation, *, is_kept: bool) -> None:
        """Tell the GPU ledger what became of the engine's work: only the last sample is kept."""
        for place, request in enumerate(reversed(generation.samples)):
            self.gpu.settle(request, Fate.KEPT if is_kept and not place else Fate.WASTED)

    def hint(self, job: str, state: SessionState) -> None:
        """Tell what became of a job's sessions; one with a step here is told of after it."""
        for leaf in self._leaves.of_job(job):
            if state is SessionState.ENDED:
                self._end(leaf)
            elif leaf.step is None:
                self._note(SessionIdle(leaf.session))

    def cancel(self, generation: Generation) -> None:
        """Take the step out of the line or out of the engine, wherever it is; interrupt it."""
        if generation.step_id not in self._known:
            generation.interrupt()
            return
        self._note(StepCancelled(generation.step_id))
        if not generation.dispatched.is_set():
            del self._known[generation.step_id]
            self._waits_no_more(generation)
            generation.interrupt()

    def engine_lost(self) -> list[Generation]:
        """Tell that the engine is gone; return the steps that were in it and forget them."""
        lost = [g for g in self._known.values() if g.dispatched.is_set()]
        for generation in lost:
            del self._known[generation.step_id]
        self.touches.forget()
        self._tell(EngineLost())
        return lost

    def engine_gave_output(self) -> None:
        """Note that the engine makes progress."""
        self.last_output_s = self.now()

    def close(self) -> None:
        """Abort touches and call the scheduler no more."""
        self._closed = True
        self.touches.close()
        if self._timer:
            self._timer.cancel()

    def start_window(self) -> int:
        """Return how many steps of new sessions may be in the service now."""
        return self._scheduler.start_window()

    def notify_window(self) -> None:
        """Wake those who wait for the start window."""
        self._window_changed.set()
        self._window_changed = asyncio.Event()

    async def window_changed(self) -> None:
        """Wait until the start window may be another."""
        await self._window_changed.wait()

    def place_in_line(self, generation: Generation) -> int | None:
        """Return how many ready steps go before this one, or None if it is not waiting."""
        return self._scheduler.place_in_line(generation.step_id)

    def counts(self) -> tuple[int, int]:
        """Return the number of steps that are (ready, in the engine)."""
        return self._scheduler.counts()

    @property
    def num_sessions(self) -> int:
        """Sessions known, whatever they do now."""
        return len(self._leaves)

    def retry_after_s(self) -> float | None:
        """Return None if a step of a new session would be taken, else when to ask again."""
        return self._scheduler.retry_after_s()

    def view(self) -> SchedulerView:
        """Return the scheduler's snapshot for people."""
        return self._scheduler.view(self.now())

    def _tell(self, event: Event) -> None:
        if self._closed:
            return
        self._scheduler.receive(event, self.now())
        if not self._schedule_is_due:
            self._schedule_is_due = True
            asyncio.get_running_loop().call_soon(self._schedule)

    def _note(self, event: Event) -> None:
        """Tell what nobody waits for, so that nobody shall fail because of it."""
        try:
            self._tell(event)
        except IllegalEventError:
            self.tally.refused_events += 1
            log.exception("the scheduler refuses %s", event)

    def _schedule(self) -> None:
        self._schedule_is_due = False
        if self._closed:
            return
        try:
            self._carry_out(self.now())
        except Exception as error:
            # Whatever was decided is half done: nothing after this can be trusted.
            log.exception("the scheduler has failed")
            self.close()
            self.on_fault(f"the scheduler has failed: {type(error).__name__}: {error}")

    def _carry_out(self, now: float) -> None:
        for decision in self._scheduler.schedule(now):
            match decision:
                case Dispatch(cohort):
                    self._dispatch(cohort, now)
                case Abort(step_id):
                    self._abort(step_id)
                case Reject():
                    self._reject(decision)
                case Shed(step_id, reason):
                    self._shed(step_id, reason)
                case Refresh(session, num_tokens):
                    self.touches.overhead.refreshes += 1
                    self._touch(session, num_tokens)
                case Prewarm(session, num_tokens):
                    self.touches.overhead.prewarms += 1
                    self._touch(session, num_tokens)
        ready, in_engine = self._scheduler.counts()
        self.gpu.line(is_ready=ready > 0, is_entering=in_engine > 0, now=now)
        self._set_timer(now)
        self.notify_window()

    def _set_timer(self, now: float) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        wake = self._scheduler.next_wake(now)
        if wake is not None:
            pause_s = max(wake - now, MIN_PAUSE_S)
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._schedule)

    def _dispatch(self, cohort: tuple[str, ...], now: float) -> None:
        if self._scheduler.counts()[1] == len(cohort):
            self.last_output_s = now
        self.tally.cohorts += 1
        self.tally.steps += len(cohort)
        self.last_cohorts.append(Cohort(now, cohort))
        for step_id in cohort:
            generation = self._known[step_id]
            self._waits_no_more(generation)
            generation.dispatched_s = now
            generation.cohort_size = len(cohort)
            generation.dispatched.set()

    def _abort(self, step_id: str) -> None:
        generation = self._known.get(step_id)
        if generation is None:
            return  # it has left by itself in this turn of the loop
        if generation.stop_cause is None:
            generation.stop_cause = StopCause.STALE
        generation.interrupt()

    def _reject(self, rejection: Reject) -> None:
        generation = self._known.pop(rejection.step_id, None)
        if generation is None:
            return
        self._waits_no_more(generation)
        room = generation.step.sampling.max_tokens
        generation.rejection = LimitExceededError(
            f"the prompt with room for {room:,} tokens of answer, against {rejection.what},",
            rejection.size,
            rejection.limit,
            "tokens",
            hint="shorten the input, lower `sampling.max_tokens`, or serve the model with a larger "
            "`--max-model-len` or KV cache",
        )
        generation.dispatched.set()

    def _shed(self, step_id: str, reason: str) -> None:
        generation = self._known.pop(step_id, None)
        if generation is None:
            return
        self._waits_no_more(generation)
        self.tally.shed += 1
        generation.rejection = StaleStepError(
            f"LLM step {step_id!r} was dropped while it waited: {reason}",
            hint="give the job a later deadline, or the service more capacity",
        )
        generation.dispatched.set()

    def _touch(self, session: str, num_tokens: int) -> None:
        leaf = self._leaves.get(session)
        self.touches.begin(session, leaf.token_ids if leaf else None, num_tokens)

    def _touched(self, session: str, cached_tokens: int, num_tokens: int) -> None:
        self._note(TouchDone(session, cached_tokens))
        if cached_tokens != FAILED:
            self._watch.touched(session, num_tokens)

    def _end(self, leaf: Leaf) -> None:
        if leaf.step is not None:
            leaf.is_over = True
            return
        self._watch.end(leaf.session)
        self._leaves.drop(leaf)
        self._note(SessionEnded(leaf.session))

    def _waits_no_more(self, generation: Generation) -> None:
        """Stop watching the session of a step that leaves the line, wherever it goes."""
        assert generation.leaf is not None
        self._watch.end(generation.leaf.session)

    def _note_eviction(self, session: str, cached_tokens: int) -> None:
        self._note(KVEvicted(session, cached_tokens))
