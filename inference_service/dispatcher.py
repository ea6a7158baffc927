"""The scheduler's shell: tells it what happens and carries out what it decides.

Events of one turn of the event loop are scheduled together: that is how cohorts form.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from contracts.error import LimitExceededError
from inference_service.generation import Generation
from inference_service.scheduler.decision import Abort, Dispatch, Reject
from inference_service.scheduler.event import (
    EngineLost,
    Event,
    FirstToken,
    Node,
    StepCancelled,
    StepFailed,
    StepFinished,
    StepReady,
)
from inference_service.scheduler.protocol import Scheduler


class Dispatcher:
    """Runs one scheduler on one event loop. `cohorts` and `steps` count what was dispatched."""

    def __init__(
        self, scheduler: Scheduler, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.now = clock
        self.cohorts = 0
        self.steps = 0
        self._scheduler = scheduler
        self._known: dict[str, Generation] = {}
        self._schedule_is_due = False
        self._window_changed = asyncio.Event()

    def ready(self, generation: Generation, prompt_tokens: int, uncomputed_tokens: int) -> None:
        """Tell that the step can go to the engine; `generation.dispatched` is set when it may."""
        step = generation.step
        generation.ready_s = self.now()
        self._known[step.step_id] = generation
        self._tell(
            StepReady(
                step_id=step.step_id,
                session=step.job_id,
                path=(Node(step.step_id, prompt_tokens),),
                max_tokens=step.sampling.max_tokens,
                is_new=step.base is None or step.base.token_run is None,
                cached_tokens=prompt_tokens - uncomputed_tokens,
                priority=step.hints.priority,
            )
        )

    def first_token(self, generation: Generation) -> None:
        """Tell that the engine has computed the step's prompt."""
        if generation.step_id in self._known:
            generation.first_token_s = self.now()
            self._tell(FirstToken(generation.step_id, generation.usage.cached_tokens))

    def left_engine(self, generation: Generation, *, finished: bool) -> None:
        """Tell that the step's seat is free."""
        if self._known.pop(generation.step_id, None):
            step_id = generation.step_id
            leaf = Node(
                step_id, generation.usage.prompt_tokens + generation.usage.completion_tokens
            )
            self._tell(StepFinished(step_id, leaf) if finished else StepFailed(step_id))

    def cancel(self, generation: Generation) -> None:
        """Take the step out of the line or out of the engine, wherever it is; interrupt it."""
        if generation.step_id not in self._known:
            generation.interrupt()
            return
        self._tell(StepCancelled(generation.step_id))
        if not generation.dispatched.is_set():
            del self._known[generation.step_id]
            generation.interrupt()

    def engine_lost(self) -> None:
        """Tell that the engine is gone, and every dispatched step with it."""
        for step_id, generation in list(self._known.items()):
            if generation.dispatched.is_set():
                del self._known[step_id]
        self._tell(EngineLost())

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

    def _tell(self, event: Event) -> None:
        self._scheduler.receive(event, self.now())
        if not self._schedule_is_due:
            self._schedule_is_due = True
            asyncio.get_running_loop().call_soon(self._schedule)

    def _schedule(self) -> None:
        self._schedule_is_due = False
        now = self.now()
        for decision in self._scheduler.schedule(now):
            match decision:
                case Dispatch(cohort):
                    self._dispatch(cohort, now)
                case Abort(step_id):
                    self._known[step_id].interrupt()
                case Reject():
                    self._reject(decision)
        self.notify_window()

    def _dispatch(self, cohort: tuple[str, ...], now: float) -> None:
        self.cohorts += 1
        self.steps += len(cohort)
        for step_id in cohort:
            generation = self._known[step_id]
            generation.dispatched_s = now
            generation.cohort_size = len(cohort)
            generation.dispatched.set()

    def _reject(self, rejection: Reject) -> None:
        generation = self._known.pop(rejection.step_id)
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
