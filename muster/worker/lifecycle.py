"""How every worker process runs: until it is told to stop, then it finishes what it has in hand."""

from __future__ import annotations

import asyncio
import logging
import signal

from temporalio.worker import Worker

_logger = logging.getLogger(__name__)


def stop_event() -> asyncio.Event:
    """Return an event that SIGTERM or SIGINT sets."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def run_until(stop: asyncio.Event, worker: Worker) -> None:
    """Run a Temporal worker until `stop` is set or it fails; its tasks get its grace period."""
    running = asyncio.create_task(worker.run())
    stopping = asyncio.create_task(stop.wait())
    _logger.info("polling", extra={"queue": worker.task_queue})
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            _logger.info("stopping", extra={"queue": worker.task_queue})
            await worker.shutdown()
    finally:
        stopping.cancel()
    await running
