"""One part under supervision: started, watched, started again when it dies or hangs, stopped.

States: waiting → starting → up; up → restarting → starting → up … (a death, or a health check that
fails for UNHEALTHY_LIMIT_S); restarting → failed after RESTART_LIMIT deaths in a row; any →
stopping → stopped. A part that stayed up for HEALTHY_S has its count of deaths in a row forgotten.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from contracts.error import MusterError, UnavailableError
from muster.stack.guard import guard
from muster.stack.part import Part, start_part
from muster.stack.process import ChildProcess, describe_status
from muster.stack.state import PartRecord, PartState

FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 10.0
HEALTHY_S = 30.0
RESTART_LIMIT = 100
"""Deaths in a row before a part is left alone: about a quarter of an hour of trying."""

CHECK_INTERVAL_S = 5.0
UNHEALTHY_LIMIT_S = 120.0
"""A busy machine is slow to answer; only what stays silent this long is killed."""

_logger = logging.getLogger(__name__)


class SupervisedPart:
    """A part and the process that runs it now; `changed` is called when `record` has changed."""

    def __init__(
        self, part: Part, log: Path, start_timeout_s: float, changed: Callable[[], None]
    ) -> None:
        self.part = part
        self._log = log
        self._start_timeout_s = start_timeout_s
        self._changed = changed
        self._child: ChildProcess | None = None
        self._watch: asyncio.Task[None] | None = None
        self.record = PartRecord(
            name=part.name, state=PartState.WAITING, address=part.address, log=str(log)
        )

    async def start(self) -> None:
        """Start the part for the first time and watch it; raises what `start_part` raises."""
        await self._start()
        self._watch = asyncio.create_task(self._keep_up(), name=f"watch {self.part.name}")

    async def stop(self) -> None:
        """Stop the part and do not start it again."""
        if self._watch:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._child and self._child.returncode is None:
            self._set(PartState.STOPPING)
            status = await self._child.stop()
            _logger.info("stopped", extra={"part": self.part.name, "status": status})
        self._set(PartState.STOPPED, pid=None)

    def kill_now(self) -> None:
        """Kill the part's process at once, also while it starts or stops."""
        if self._child:
            self._child.kill_now()

    async def _start(self) -> None:
        self._set(PartState.STARTING)
        self._child = await start_part(self.part, self._log, self._start_timeout_s)
        self._set(PartState.UP, pid=self._child.pid, since=time.time(), message="")
        _logger.info("up", extra={"part": self.part.name, "pid": self._child.pid})

    async def _keep_up(self) -> None:
        """Start the part again whenever it ends, until it has ended too often in a row."""
        deaths = 0
        while True:
            up_for_s = await self._until_death()
            guard.kill_orphans()
            deaths = 1 if up_for_s > HEALTHY_S else deaths + 1
            if deaths == RESTART_LIMIT:
                break
            await asyncio.sleep(min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(deaths - 1, 10)))
            self._set(PartState.RESTARTING, restarts=self.record.restarts + 1)
            try:
                await self._start()
            except Exception as error:  # whatever it is, the next try may do better
                _logger.warning("%s", error, extra={"part": self.part.name})
                message = error.message if isinstance(error, MusterError) else repr(error)
                self._set(PartState.RESTARTING, message=message)
        self._set(PartState.FAILED, message=f"it ended {deaths} times in a row; see {self._log}")
        _logger.error("given up", extra={"part": self.part.name, "deaths": deaths})

    async def _until_death(self) -> float:
        """Wait for the end of the process, which a failing health check may bring about.

        Returns how many seconds it was up; 0 if the last start failed.
        """
        child = self._child
        if child is None or self.record.state is not PartState.UP:
            return 0.0
        started = time.monotonic()
        monitor = asyncio.create_task(self._monitor(child))
        try:
            status = await child.wait()
        finally:
            monitor.cancel()
            await asyncio.gather(monitor, return_exceptions=True)
        message = f"ended with {describe_status(status)}"
        _logger.warning(message, extra={"part": self.part.name, "pid": child.pid})
        self._set(PartState.RESTARTING, pid=None, message=message)
        return time.monotonic() - started

    async def _monitor(self, child: ChildProcess) -> None:
        """Kill the process once its health check has failed for UNHEALTHY_LIMIT_S."""
        healthy_at = time.monotonic()
        while time.monotonic() - healthy_at < UNHEALTHY_LIMIT_S:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                await asyncio.wait_for(self.part.watch(), CHECK_INTERVAL_S)
            except (UnavailableError, TimeoutError) as error:
                self._set(PartState.UP, message=f"unhealthy: {str(error) or 'no answer'}")
            else:
                healthy_at = time.monotonic()
                if self.record.message:
                    self._set(PartState.UP, message="")
        _logger.error("unhealthy for too long, killed", extra={"part": self.part.name})
        await child.kill()

    def _set(self, state: PartState, **changes: object) -> None:
        self.record = self.record.model_copy(update={"state": state, **changes})
        self._changed()
