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


async def run_until(stop: asyncio.Event, *workers: Worker) -> None:
    """Run Temporal workers until `stop` is set or one fails; their tasks get their grace period."""
    running = [asyncio.create_task(worker.run()) for worker in workers]
    stopping = asyncio.create_task(stop.wait())
    queues = ", ".join(worker.task_queue for worker in workers)
    _logger.info("polling", extra={"queue": queues})
    try:
        await asyncio.wait({*running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        _logger.info("stopping", extra={"queue": queues})
        await asyncio.gather(
            *(
                worker.shutdown()
                for worker, task in zip(workers, running, strict=True)
                if not task.done()
            )
        )
    finally:
        stopping.cancel()
    await asyncio.gather(*running)
