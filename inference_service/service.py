"""The inference service: attempts come and go, generations go on.

Theory of operation. An attempt (one Temporal activity attempt) `attach`es to the generation of its
step id and waits for it; a second attempt joins the same generation. The generation (`step.py`)

    1. claims the step id in the ledger (a finished step's stored result is returned as it is),
    2. resolves its context to token ids,
    3. becomes ready; the scheduler decides when it is dispatched, in a cohort,
    4. is sampled by the engine, and sampled again, bounded, if the text is not the form asked for,
    5. commits the new context, its token ids and the ledger row in one transaction.

It is interrupted in 3 and 4 only: when its job is cancelled, when no attempt is attached any more,
or when the replica drains. All of this runs on one event loop, so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta

from contracts.error import BadInputError, UnavailableError
from contracts.llm_step import LLMStepInput, LLMStepResult, SessionHint, StepHeartbeat
from contracts.message import content_hash
from inference_service.dispatcher import Dispatcher
from inference_service.engine.protocol import Engine, EngineDeadError
from inference_service.failure import DrainingError, OverloadedError
from inference_service.generation import Generation, StopCause
from inference_service.progress import wait_for_stall
from inference_service.scheduler.protocol import Scheduler
from inference_service.session import Sessions
from inference_service.step import StepProtocol, StepSettings
from store.context import ContextStore
from store.step_ledger import StepLedger

log = logging.getLogger(__name__)


class InferenceService:
    """Serves LLM steps of one model on one started engine."""

    def __init__(
        self,
        *,
        engine: Engine,
        scheduler: Scheduler,
        ledger: StepLedger,
        contexts: ContextStore,
        replica: str,
        settings: StepSettings | None = None,
    ) -> None:
        self.engine = engine
        self.replica = replica
        self.dispatcher = Dispatcher(scheduler, engine, on_fault=self._give_up)
        self.engine_died = asyncio.Event()
        """Set when the engine is gone: the process should leave and be started again."""
        self.trouble = ""
        """Why the engine cannot serve any more, though it may look alive."""
        self.on_end: set[Callable[[Generation], object]] = set()
        """Called for each generation that has ended, however."""
        self.on_finished: Callable[[Generation, LLMStepResult], object] = lambda *_: None
        """Called for each step that was generated and committed here."""
        self.sessions = Sessions(engine.tokenizer, contexts)
        self._ledger = ledger
        self._live: dict[str, Generation] = {}
        self._draining = False
        self._protocol = StepProtocol(
            engine=engine,
            dispatcher=self.dispatcher,
            ledger=ledger,
            contexts=contexts,
            sessions=self.sessions,
            replica=replica,
            settings=settings or StepSettings(),
        )

    async def attach(self, step: LLMStepInput, attempt: bytes) -> Generation:
        """Return the running generation of a step, begun now if there is none.

        `attempt` is the task token of the attempt that will wait for it. Raises `BadInputError` if
        the step id is running with another input, `DrainingError` if the replica is going away,
        `OverloadedError` if a new session would find no room: before anything is done for it.
        """
        digest = content_hash(step)
        while running := self._live.get(step.step_id):
            if running.stop_cause is None:
                return await self._join(running, digest, attempt)
            await asyncio.wait({running.task})
        if self._draining:
            raise DrainingError(f"replica {self.replica!r} is draining")
        if step.is_first and (wait_s := self.dispatcher.retry_after_s()) is not None:
            raise OverloadedError(timedelta(seconds=wait_s))
        generation = Generation(step, digest, created_s=self.dispatcher.now(), attempts={attempt})
        self._live[step.step_id] = generation
        task = asyncio.create_task(self._protocol.run(generation, attempt), name=step.step_id)
        task.add_done_callback(lambda task: self._ended(generation, task))
        generation.begin(task)
        return generation

    def detach(self, generation: Generation, attempt: bytes, cause: StopCause | None) -> None:
        """Say that an attempt waits no more, because of `cause` (None: it has its result).

        A cancelled or drained step stops now; an abandoned one when its last attempt is gone.
        """
        generation.attempts.discard(attempt)
        if cause is None or generation.task.done():
            return
        if cause is not StopCause.ABANDONED or not generation.attempts:
            self._stop(generation, cause)

    def generation(self, step_id: str) -> Generation | None:
        """Return the running generation of a step, or None."""
        return self._live.get(step_id)

    def generations(self, job_id: str) -> list[Generation]:
        """Return the running generations of a job."""
        return [each for each in self._live.values() if each.step.job_id == job_id]

    def heartbeat(self, generation: Generation) -> StepHeartbeat:
        """Return what the step's next heartbeat should say."""
        return StepHeartbeat(
            phase=generation.phase,
            place_in_line=self.dispatcher.place_in_line(generation),
            completion_tokens=generation.usage.completion_tokens,
        )

    def drain(self) -> None:
        """Take no new step, and hand back those that wait in line; those in the engine go on."""
        self._draining = True
        self.dispatcher.touches.close()
        for generation in list(self._live.values()):
            if not generation.dispatched.is_set():
                self._stop(generation, StopCause.DRAINED)

    async def watch_progress(self, limit: timedelta) -> None:
        """Wait until the engine makes no progress for `limit`; then give up every step in it."""
        stalled_s = await wait_for_stall(self.engine, self.dispatcher, limit)
        self._give_up(
            f"the engine makes no progress: nothing for {stalled_s:.1f} s with steps in it"
        )

    def close(self) -> None:
        """End what the service does of its own; no step may be running any more."""
        self.dispatcher.close()

    def hint(self, hint: SessionHint) -> None:
        """Note what a job's workflow says of its sessions."""
        self.dispatcher.hint(hint.job_id, hint.state)

    async def record_progress(self) -> None:
        """Record in the ledger what running steps have used: the count left after a SIGKILL."""
        for generation in list(self._live.values()):
            if generation.usage.prompt_tokens:
                try:
                    await self._ledger.progress(
                        generation.step_id, generation.epoch, generation.usage
                    )
                except UnavailableError as error:
                    log.warning("progress is not in the ledger: %s", error)
                    return

    def start_window(self) -> int:
        """Return how many steps of new sessions may be in the service now."""
        return 0 if self._draining else self.dispatcher.start_window()

    async def _join(self, running: Generation, digest: str, attempt: bytes) -> Generation:
        if running.digest != digest:
            raise BadInputError(
                f"LLM step {running.step_id!r} is running with another input",
                hint="a step id names one input for ever; a changed job needs a new branch",
            )
        running.attempts.add(attempt)
        if running.epoch:
            try:
                await self._ledger.attach(running.step_id, running.epoch, attempt)
            except BaseException:
                running.attempts.discard(attempt)
                raise
        return running

    def _stop(self, generation: Generation, cause: StopCause) -> None:
        if generation.stop_cause is None:
            generation.stop_cause = cause
            self.dispatcher.cancel(generation)

    def _ended(self, generation: Generation, task: asyncio.Task[LLMStepResult]) -> None:
        del self._live[generation.step_id]
        for told in list(self.on_end):
            told(generation)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, EngineDeadError):
            self._lose_engine(str(error))
        elif error is None and generation.samples and task.result().message is not None:
            self.on_finished(generation, task.result())

    def _give_up(self, trouble: str) -> None:
        """Give up all that is here, for another process to go on with."""
        for generation in self._lose_engine(trouble):
            self._stop(generation, StopCause.STUCK)

    def _lose_engine(self, trouble: str) -> list[Generation]:
        """Hand back what waits and ask for a new process; return what was in the engine."""
        if self.engine_died.is_set():
            return []
        log.error("%s", trouble)
        self.trouble = trouble
        self.engine_died.set()
        lost = self.dispatcher.engine_lost()
        self.drain()
        return lost
