"""The text that a running job writes, as its inference service streams it.

Every interruption is waited out: the service tells a step's text from its beginning to a reader who
comes again, so that nothing is read twice or lost. A service that is away, or that does not stream,
costs the job nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

RETRY_EVERY_S = 1.0
CONNECT_TIMEOUT_S = 5.0
SILENCE_S = 60.0
"""The service pings four times in this time."""


@dataclass(slots=True)
class Draft:
    """What a job's steps have written that are not over: the reader's side of the stream.

    A new attempt at a step's text takes the place of the one before.
    """

    texts: dict[str, str] = field(default_factory=dict)
    """By step id, in the order in which the steps began."""
    _attempts: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """What is being written now."""
        return "\n".join(text for text in self.texts.values() if text)

    def take(self, event: str, data: dict[str, Any]) -> None:
        """Note an event; what is not known is left alone."""
        step_id, attempt = str(data.get("step_id", "")), str(data.get("attempt", ""))
        match event:
            case "begun":
                self._attempts[step_id] = attempt
                self.texts[step_id] = ""
            case "written" if self._attempts.get(step_id) == attempt:
                self.texts[step_id] += str(data.get("text", ""))
            case "ended":
                self._attempts.pop(step_id, None)
                self.texts.pop(step_id, None)

    def clear(self) -> None:
        """Forget what was read: the connection is lost, and all comes again."""
        self.texts.clear()
        self._attempts.clear()


@asynccontextmanager
async def drafting(url: str, job_id: str, *, on: bool = True) -> AsyncIterator[Draft]:
    """Read along while the block runs; with `on` false the draft stays empty."""
    draft = Draft()
    reading = asyncio.create_task(read_draft(url, job_id, draft)) if on else None
    try:
        yield draft
    finally:
        if reading:
            reading.cancel()
            await asyncio.wait({reading})


async def read_draft(url: str, job_id: str, draft: Draft) -> None:
    """Keep `draft` at what the job writes, until cancelled; `url` is the service's."""
    import httpx  # here, since most commands follow no job

    address = f"{url.rstrip('/')}/jobs/{quote(job_id, safe='')}/stream"
    timeout = httpx.Timeout(CONNECT_TIMEOUT_S, read=SILENCE_S)
    async with httpx.AsyncClient(timeout=timeout) as client:
        while True:
            try:
                async with client.stream("GET", address) as answer:
                    answer.raise_for_status()
                    async for event, data in server_events(answer.aiter_lines()):
                        draft.take(event, data)
            except (httpx.HTTPError, ValueError):
                pass  # it is away, or restarts
            draft.clear()
            await asyncio.sleep(RETRY_EVERY_S)


async def server_events(lines: AsyncIterator[str]) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield the events of a `text/event-stream`, by name and JSON; raises ValueError."""
    name, data = "", list[str]()
    async for line in lines:
        if line.startswith("event:"):
            name = line.removeprefix("event:").strip()
        elif line.startswith("data:"):
            data.append(line.removeprefix("data:").strip())
        elif not line and data:
            value = json.loads("\n".join(data))
            if isinstance(value, dict):
                yield name, value
            name, data = "", []
