"""The service on Temporal: its activities, its two task queues, and the start window."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta

from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError
from temporalio.worker import (
    CustomSlotSupplier,
    FixedSizeSlotSupplier,
    SlotMarkUsedContext,
    SlotPermit,
    SlotReleaseContext,
    SlotReserveContext,
    Worker,
    WorkerTuner,
)

from contracts.error import MusterError
from contracts.llm_step import LLMStepInput, LLMStepResult, SessionHint
from contracts.name import LLM_STEP, SESSION_HINT, continue_queue, start_queue
from inference_service.failure import bounded, to_temporal
from inference_service.generation import Generation, StopCause
from inference_service.service import InferenceService
from store.step_ledger import StepLedger

log = logging.getLogger(__name__)

MAX_CONTINUATIONS = 2_048
"""Steps of known sessions held at once: the scheduler must see every one of them."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How the service meets Temporal.

    `first_heartbeat` and `heartbeat` are for liveness. Where the server does not push
    cancellations, `cancel_heartbeat` is the interval at which steps in the engine ask for theirs.
    `drain` bounds how long steps in the engine may go on after SIGTERM. `progress` is how long an
    engine with steps in it may compute nothing: more than one chunk of a prompt takes.
    """

    first_heartbeat: timedelta = timedelta(seconds=5)
    heartbeat: timedelta = timedelta(seconds=5)
    cancel_heartbeat: timedelta | None = None
    drain: timedelta = timedelta(seconds=20)
    progress: timedelta = timedelta(minutes=2)


class LLMStepActivity:
    """The service's activities; an attempt of `llm_step` attaches to a generation and waits."""

    def __init__(self, service: InferenceService, settings: WorkerSettings) -> None:
        self._service = service
        self._settings = settings

    @activity.defn(name=LLM_STEP)
    async def llm_step(self, step: LLMStepInput) -> LLMStepResult:
        """Return the step's result; a cancelled step returns `outcome=cancelled` and its usage."""
        attempt = activity.info().task_token
        try:
            generation = await self._service.attach(step, attempt)
            cause: StopCause | None = None
            try:
                await self._wait(generation)
            except asyncio.CancelledError:
                cause = _stop_cause()
                self._service.detach(generation, attempt, cause)
                if cause is StopCause.ABANDONED:
                    raise
                await asyncio.wait({generation.task})
            finally:
                self._service.detach(generation, attempt, None)
            return generation.task.result()
        except MusterError as error:
            raise to_temporal(error) from error
        except ApplicationError:
            raise
        except Exception as error:
            log.exception("step %s: a fault of the service", step.step_id)
            fault = bounded(f"{type(error).__name__}: {error}")
            raise ApplicationError(fault, type="ServiceFault") from error

    @activity.defn(name=SESSION_HINT)
    async def session_hint(self, hint: SessionHint) -> None:
        """Note what became of a job's sessions."""
        self._service.hint(hint)

    async def _wait(self, generation: Generation) -> None:
        settings = self._settings
        interval_s = settings.first_heartbeat.total_seconds()
        if settings.cancel_heartbeat:
            interval_s = settings.cancel_heartbeat.total_seconds()
        while True:
            done, _ = await asyncio.wait({generation.task}, timeout=interval_s)
            if done:
                return
            activity.heartbeat(self._service.heartbeat(generation))
            in_engine = generation.dispatched.is_set()
            beat = (settings.cancel_heartbeat if in_engine else None) or settings.heartbeat
            interval_s = beat.total_seconds()


def _stop_cause() -> StopCause:
    details = activity.cancellation_details()
    if details and details.cancel_requested:
        return StopCause.CANCELLED
    if details and details.worker_shutdown:
        return StopCause.DRAINED
    return StopCause.ABANDONED


class StartSlotSupplier(CustomSlotSupplier):
    """Lets the worker poll for new sessions only while the scheduler's start window has room.

    What it does not poll stays in Temporal: durable, ordered, shared by all replicas.
    """

    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._reserved = 0

    async def reserve_slot(self, ctx: SlotReserveContext) -> SlotPermit:
        """Wait for room in the window."""
        while self._reserved >= self._service.start_window():
            await self._service.dispatcher.window_changed()
        self._reserved += 1
        return SlotPermit()

    def try_reserve_slot(self, ctx: SlotReserveContext) -> SlotPermit | None:
        """Refuse: it is asked for eager activities only, and this worker has no workflows."""
        return None

    def mark_slot_used(self, ctx: SlotMarkUsedContext) -> None:
        """Do nothing: a slot counts from its reservation on."""

    def release_slot(self, ctx: SlotReleaseContext) -> None:
        """Give the slot back; called from the SDK's own threads."""
        self._loop.call_soon_threadsafe(self._released)

    def _released(self) -> None:
        self._reserved -= 1
        self._service.dispatcher.notify_window()


async def fail_orphans(client: Client, ledger: StepLedger, replica: str) -> int:
    """Fail the attempts that a predecessor of this replica left behind; return how many.

    Temporal then retries them at once instead of waiting for their heartbeat timeout.
    """
    orphans = await ledger.abandon_orphans(replica)
    gone = ApplicationError(f"replica {replica!r} was restarted", type="ReplicaRestarted")
    for orphan in orphans:
        handle = client.get_async_activity_handle(task_token=orphan.task_token)
        try:
            await handle.fail(gone)
        except RPCError as error:
            log.info("orphan %s is known no more: %s", orphan.step_id, error.message)
    return len(orphans)


async def serve(
    client: Client,
    service: InferenceService,
    *,
    model: str,
    stop: asyncio.Event,
    settings: WorkerSettings,
    identity: str,
) -> None:
    """Serve steps of `model` until `stop` is set or the engine dies; then drain and return."""
    steps = LLMStepActivity(service, settings)
    starts = Worker(
        client,
        task_queue=start_queue(model),
        activities=[steps.llm_step],
        tuner=_tuner(StartSlotSupplier(service)),
        identity=identity,
        graceful_shutdown_timeout=settings.drain,
        max_heartbeat_throttle_interval=settings.cancel_heartbeat or settings.heartbeat,
    )
    continuations = Worker(
        client,
        task_queue=continue_queue(model),
        activities=[steps.llm_step, steps.session_hint],
        tuner=_tuner(FixedSizeSlotSupplier(MAX_CONTINUATIONS)),
        identity=identity,
        graceful_shutdown_timeout=settings.drain,
        max_heartbeat_throttle_interval=settings.cancel_heartbeat or settings.heartbeat,
    )
    async with AsyncExitStack() as stack:
        progress = asyncio.create_task(_record_progress(service, settings.heartbeat))
        stack.callback(service.close)
        stack.callback(progress.cancel)
        watchdog = asyncio.create_task(service.watch_progress(settings.progress))
        stack.callback(watchdog.cancel)
        await stack.enter_async_context(starts)
        await stack.enter_async_context(continuations)
        stopped = asyncio.create_task(stop.wait())
        died = asyncio.create_task(service.engine_died.wait())
        await asyncio.wait({stopped, died}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        died.cancel()
        service.drain()


def _tuner(activities: FixedSizeSlotSupplier | CustomSlotSupplier) -> WorkerTuner:
    unused = FixedSizeSlotSupplier(1)
    return WorkerTuner.create_composite(
        workflow_supplier=unused,
        activity_supplier=activities,
        local_activity_supplier=unused,
        nexus_supplier=unused,
    )


async def _record_progress(service: InferenceService, interval: timedelta) -> None:
    while True:
        await asyncio.sleep(interval.total_seconds())
        await service.record_progress()
