"""Histories to and from the archive: page by page, compressed, in chunks of bounded size.

Protobuf messages of one type that are put end to end are one message, so the pages that the server
sends need not be held together to be one `History`.
"""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import History, HistoryEvent
from temporalio.client import Client

from muster.history import time_ns
from store.archive import CHUNK_BYTES, ArchivedRun, put_chunk, put_run

PAGE_EVENTS = 250
"""Events asked for at once; the server sends fewer if they are large."""

_GZIP = 31
"""zlib's number for its largest window, in gzip's format."""

_PREFIX = "EVENT_TYPE_WORKFLOW_EXECUTION_"


@dataclass(slots=True)
class HistoryEncoder:
    """Turns the pages of one history into chunks; counts its events, and its bytes as protobuf."""

    chunk_bytes: int = CHUNK_BYTES
    events: int = 0
    size_bytes: int = 0
    _waiting: bytearray = field(default_factory=bytearray)
    _gzip: zlib._Compress = field(default_factory=lambda: zlib.compressobj(wbits=_GZIP))

    def add(self, events: Sequence[HistoryEvent]) -> list[bytes]:
        """Take the next events; return the chunks that are full."""
        page = History(events=events).SerializeToString()
        self.events += len(events)
        self.size_bytes += len(page)
        self._waiting += self._gzip.compress(page)
        return [self._cut() for _ in range(len(self._waiting) // self.chunk_bytes)]

    def finish(self) -> list[bytes]:
        """Return the chunks that are left."""
        self._waiting += self._gzip.flush()
        chunks: list[bytes] = []
        while self._waiting:
            chunks.append(self._cut())
        return chunks

    def _cut(self) -> bytes:
        chunk = bytes(self._waiting[: self.chunk_bytes])
        del self._waiting[: self.chunk_bytes]
        return chunk


def decode_history(chunks: Sequence[bytes]) -> list[HistoryEvent]:
    """Return the events of a history from its chunks."""
    return list(History.FromString(gzip.decompress(b"".join(chunks))).events)


async def history_pages(
    client: Client, job_id: str, run_id: str
) -> AsyncIterator[Sequence[HistoryEvent]]:
    """Yield the history of one run, page by page; raises RPCError."""
    found = client.get_workflow_handle(job_id, run_id=run_id).fetch_history_events(
        page_size=PAGE_EVENTS
    )
    while True:
        await found.fetch_next_page()
        if found.current_page:
            yield found.current_page
        if not found.next_page_token:
            return


async def export_run(
    client: Client, connection: AsyncConnection, job_id: str, run_id: str
) -> ArchivedRun:
    """Copy a closed run's history to the archive, one page and one chunk in memory at a time."""
    encoder, number = HistoryEncoder(), 0
    first: HistoryEvent | None = None
    last: HistoryEvent | None = None
    async for page in history_pages(client, job_id, run_id):
        first, last = first or page[0], page[-1]
        for chunk in await asyncio.to_thread(encoder.add, page):
            await put_chunk(connection, job_id, run_id, number, chunk)
            number += 1
    for chunk in encoder.finish():
        await put_chunk(connection, job_id, run_id, number, chunk)
        number += 1
    assert first and last, "a history has at least its first event"
    started = first.workflow_execution_started_event_attributes
    run = ArchivedRun(
        job_id=job_id,
        run_id=run_id,
        previous_run_id=started.continued_execution_run_id or None,
        started_at=_moment(first),
        closed_at=_moment(last),
        status=EventType.Name(last.event_type).removeprefix(_PREFIX).lower(),
        events=encoder.events,
        bytes=encoder.size_bytes,
    )
    await put_run(connection, run)
    return run


def _moment(event: HistoryEvent) -> datetime:
    return datetime.fromtimestamp(time_ns(event) / 1e9, UTC)
