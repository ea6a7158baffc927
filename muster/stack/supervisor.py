"""The supervisor: starts the parts in order, keeps them up, stops them in order.

Order: Temporal and PostgreSQL; then namespace and migrations; then inference service and workers.
Stopping goes the other way. Parts that settings name elsewhere are checked, not started.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Coroutine, Iterable

from contracts.error import BadInputError
from muster.connection import connect_to
from muster.settings import Settings
from muster.stack.guard import guard
from muster.stack.log_file import keep_bounded
from muster.stack.namespace import prepare_namespace, register_search_attributes
from muster.stack.part import Part
from muster.stack.port import check_ports
from muster.stack.postgres import PostgresPart, choose_user
from muster.stack.state import (
    PartRecord,
    PartState,
    StackPhase,
    StackRecord,
    remove_record,
    write_record,
)
from muster.stack.supervised import SupervisedPart
from muster.stack.temporal import TemporalPart, check_server
from muster.stack.worker import InferencePart, WorkerPart, check_inference
from store.migrate import upgrade

PART_NAMES = ("temporal", "postgres", "inference", "agents", "tools")

LAST_WAIT_S = 5.0
"""A killed process that is not gone after this sits in the kernel; nobody can help that."""

LATE_S = 1.0
"""Pause before the state file is tried again when it could not be written."""

_logger = logging.getLogger(__name__)


class Supervisor:
    """Runs the parts named in `only` of one data directory, whose lock the caller holds.

    `changed` is called with a new StackRecord whenever something changes.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        only: Collection[str] = PART_NAMES,
        changed: Callable[[StackRecord], None] = lambda record: None,
    ) -> None:
        check_only(only)
        self._settings = settings
        self._only = frozenset(only)
        self._changed = changed
        self._since = time.time()
        self._phase = StackPhase.STARTING
        self._stop = asyncio.Event()
        self._stops = 0
        self._late: asyncio.TimerHandle | None = None
        self._temporal = TemporalPart(
            port=settings.temporal_port,
            ui_port=settings.temporal_ui_port,
            namespace=settings.temporal_namespace,
            directory=settings.data_dir / "temporal",
        )
        self._postgres = PostgresPart(
            directory=settings.data_dir / "postgres",
            log=settings.log_dir / "postgres.log",
            user=choose_user(settings.postgres_user),
        )
        self._temporal_address = settings.temporal_address or self._temporal.address
        self._database_url = settings.database_url or self._postgres.address
        self._inference = InferencePart(settings)
        self._servers = self._supervise(
            [] if settings.temporal_address else [self._temporal],
            [] if settings.database_url else [self._postgres],
        )
        self._workers = self._supervise(
            [] if settings.inference_url else [self._inference],
            [WorkerPart(name, settings) for name in ("agents", "tools")],
        )

    async def run(self) -> None:
        """Start the parts, keep them up until SIGTERM, SIGINT or SIGHUP, then stop them all.

        Raises the error of the part that did not start; nothing is left running then either.
        """
        check_ports(self._ports())
        guard.start()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop_now)
        bounding = asyncio.create_task(keep_bounded(self._settings.log_dir))
        try:
            await self._unless_stopped(self._start())
            if not self._stop.is_set():
                self._enter(StackPhase.UP)
                await self._stop.wait()
        finally:
            self._enter(StackPhase.STOPPING)
            await self._stop_parts()
            bounding.cancel()
            guard.stop()
            remove_record(self._settings.data_dir)

    def record(self) -> StackRecord:
        """Return what the stack is like now."""
        settings = self._settings
        return StackRecord(
            phase=self._phase,
            supervisor_pid=os.getpid(),
            since=self._since,
            temporal_address=self._temporal_address,
            temporal_namespace=settings.temporal_namespace,
            temporal_ui_url="" if settings.temporal_address else self._temporal.ui_url,
            database_url=self._database_url,
            inference_url=settings.inference_url or self._inference.address,
            model=settings.served_model,
            engine=settings.engine,
            parts=tuple(self._part_records()),
        )

    async def _start(self) -> None:
        await _all(part.start() for part in self._servers)
        await _all([self._prepare_temporal(), self._prepare_database(), self._check_inference()])
        await _all(part.start() for part in self._workers)

    async def _prepare_temporal(self) -> None:
        """Register what workflows need; an external server's retention is its owner's business."""
        settings = self._settings
        if settings.temporal_address:
            await check_server(settings.temporal_address, settings.temporal_namespace)
            client = await connect_to(settings.temporal_address, settings.temporal_namespace)
            await register_search_attributes(client)
        elif "temporal" in self._only:
            await prepare_namespace(await self._temporal.connect())

    async def _prepare_database(self) -> None:
        if self._settings.database_url or "postgres" in self._only:
            await upgrade(self._database_url)

    async def _check_inference(self) -> None:
        if self._settings.inference_url:
            await check_inference(self._settings.inference_url)

    async def _stop_parts(self) -> None:
        """Stop workers, then servers; what a second signal finds still running is killed."""
        await asyncio.gather(*(part.stop() for part in self._workers))
        # PostgreSQL first: Temporal takes seconds to stop, and nothing of ours uses it any more.
        await asyncio.gather(*(part.stop() for part in self._servers))
        # What was being started when the stop came has been killed, but may still be dying.
        await asyncio.to_thread(guard.kill_all, LAST_WAIT_S)
        guard.kill_orphans()

    async def _unless_stopped(self, work: Coroutine[None, None, None]) -> None:
        """Await `work`, but cancel it when the stack is told to stop."""
        task = asyncio.create_task(work)
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            task.result()

    def _stop_now(self) -> None:
        self._stops += 1
        self._stop.set()
        if self._stops > 1:
            for part in (*self._workers, *self._servers):
                part.kill_now()

    def _supervise(self, *parts: Collection[Part]) -> list[SupervisedPart]:
        return [
            SupervisedPart(
                part,
                self._settings.log_dir / f"{part.name}.log",
                self._settings.start_timeout.total_seconds(),
                self._publish,
            )
            for group in parts
            for part in group
            if part.name in self._only
        ]

    def _ports(self) -> dict[str, int]:
        """Return the ports this stack will bind, by the setting that chooses each."""
        names = {item.part.name for item in (*self._servers, *self._workers)}
        ports: dict[str, int] = {}
        if "temporal" in names:
            ports["temporal_port"] = self._settings.temporal_port
            ports["temporal_ui_port"] = self._settings.temporal_ui_port
        if "inference" in names:
            ports["inference_port"] = self._settings.inference_port
        return ports

    def _part_records(self) -> list[PartRecord]:
        own = {item.part.name: item.record for item in (*self._servers, *self._workers)}
        external = {
            "temporal": self._settings.temporal_address,
            "postgres": self._settings.database_url,
            "inference": self._settings.inference_url,
        }
        records: list[PartRecord] = []
        for name in PART_NAMES:
            if name in own:
                records.append(own[name])
            elif address := external.get(name):
                records.append(PartRecord(name=name, state=PartState.EXTERNAL, address=address))
        return records

    def _enter(self, phase: StackPhase) -> None:
        self._phase = phase
        _logger.info("stack %s", phase)
        self._publish()

    def _publish(self) -> None:
        """Show the stack as it is; what cannot be shown now (a full disk) is shown later.

        Never raises OSError: whoever keeps a part up calls this, and must go on.
        """
        if self._late:
            self._late.cancel()
            self._late = None
        record = self.record()
        try:
            write_record(self._settings.data_dir, record)
        except OSError as error:
            _logger.warning("stack.json cannot be written: %s", error)
            self._late = asyncio.get_running_loop().call_later(LATE_S, self._publish)
        try:
            self._changed(record)
        except OSError as error:  # the terminal is gone
            _logger.warning("progress cannot be shown: %s", error)


def check_only(only: Collection[str]) -> None:
    """Raise BadInputError if `only` names a part that does not exist, or nothing."""
    unknown = sorted(set(only) - set(PART_NAMES))
    if unknown or not only:
        raise BadInputError(
            f"no such part: {', '.join(unknown)}" if unknown else "no part is named",
            hint=f"the parts are {', '.join(PART_NAMES)}",
        )


async def _all(work: Iterable[Coroutine[None, None, None]]) -> None:
    """Await all; the first error cancels the others and is raised."""
    tasks = [asyncio.create_task(item) for item in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
