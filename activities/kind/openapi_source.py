"""OpenAPI documents: fetched from URLs or files, bounded, parsed once while unchanged."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit, urlunsplit

from activities.kind.http import HttpClients, HttpRequest, origin_of, read_body
from activities.kind.openapi_document import MAX_DOCUMENT_BYTES, Document, parse_document
from activities.kind.openapi_endpoint import address_of, headers_of
from activities.kind.openapi_operation import (
    Operation,
    Place,
    UnsupportedError,
    build_operation,
    list_operations,
)
from activities.secret import Secrets
from activities.thread import start_thread
from contracts.agent import ToolRef
from contracts.error import BadInputError, LimitExceededError, UnavailableError
from contracts.limit import MAX_TOOLS
from contracts.tool_source import OpenApiService

DOWNLOAD_TIMEOUT_S = 10.0
"""For a whole document; less than what an attempt to open a job has."""

PARSE_TIMEOUT_S = 15.0
"""For making a document's text, or some of its operations, into tools."""

MAX_AGE_S = 300.0
"""After which a call has the document read anew; a job that opens always does."""

MAX_KEPT_BYTES = 32_000_000
"""Text of the documents that one worker keeps, parsed: they take ten times that in memory."""

T = TypeVar("T")

_PASSING_STATUS = frozenset((408, 425, 429))


@dataclass(slots=True)
class Source:
    """A document and its operations; each is built when it is asked for."""

    document: Document
    places: dict[str, Place]
    given: tuple[frozenset[str], frozenset[str]]
    _built: dict[str, Operation] = field(default_factory=dict)

    def operation(self, remote: str) -> Operation:
        """Return an operation; raises BadInputError if there is none of that name, or it is bad."""
        place = self.places.get(remote)
        if place is None:
            near = get_close_matches(remote, self.places, n=5) or list(self.places)[:MAX_TOOLS]
            raise self.document.bad(
                f"it has no operation {remote!r}", f"it has: {', '.join(near) or 'none'}"
            )
        if remote not in self._built:
            self._built[remote] = build_operation(self.document, remote, place, self.given)
        return self._built[remote]

    def all_supported(self) -> list[Operation]:
        """Return every operation that we can call; raises BadInputError if there are too many."""
        found: list[Operation] = []
        problem = ""
        for remote in self.places:
            try:
                found.append(self.operation(remote))
            except UnsupportedError as error:
                problem = error.message
            if len(found) > MAX_TOOLS:
                raise LimitExceededError(
                    f"openapi {self.document.shown!r}",
                    len(self.places),
                    MAX_TOOLS,
                    "operations",
                    hint="choose some of them with `tools: [...]`, by operationId",
                )
        if not found:
            raise self.document.bad(
                f"it has no operation that can be called{f': {problem}' if problem else ''}"
            )
        return found


@dataclass(slots=True)
class _Kept:
    source: Source
    digest: bytes
    size: int
    read_at: float


class Sources:
    """Reads documents, each once at a time, and keeps the last ones."""

    def __init__(self, secrets: Secrets, clients: HttpClients) -> None:
        self._secrets = secrets
        self._clients = clients
        self._kept: dict[str, _Kept] = {}
        self._reading: dict[str, asyncio.Task[Source]] = {}

    async def close(self) -> None:
        """Stop reading, forget all."""
        reading = list(self._reading.values())
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        self._kept.clear()

    async def get(self, ref: ToolRef, service: OpenApiService, *, anew: bool) -> Source:
        """Return a document, read now if `anew`; else the last one, with a new one on its way if it
        is old.

        Raises BadInputError or LimitExceededError that say what is wrong with it, UnavailableError
        while it cannot be had.
        """
        key = service.model_dump_json()
        kept = self._kept.get(key)
        if kept is None or anew:
            return await asyncio.shield(self._task(ref, service, key))
        if time.monotonic() - kept.read_at >= MAX_AGE_S:
            kept.read_at = time.monotonic()  # if it cannot be had, the next try is as far off
            self._task(ref, service, key)
        return kept.source

    def _task(self, ref: ToolRef, service: OpenApiService, key: str) -> asyncio.Task[Source]:
        task = self._reading.get(key)
        if task is None:
            task = asyncio.create_task(self._read(ref, service, key), name="read OpenAPI document")
            self._reading[key] = task
            task.add_done_callback(lambda done: self._ended(key, done))
        return task

    def _ended(self, key: str, task: asyncio.Task[Source]) -> None:
        self._reading.pop(key, None)
        if not task.cancelled():
            task.exception()  # whoever waited has it; if nobody does, it is no news

    async def _read(self, ref: ToolRef, service: OpenApiService, key: str) -> Source:
        raw, base = await self._text(ref, service)
        digest = hashlib.sha256(raw).digest()
        kept = self._kept.pop(key, None)
        if kept is None or kept.digest != digest:
            source = await in_thread(lambda: _parse(service, raw, base), service.document)
            kept = _Kept(source, digest, len(raw), 0.0)
        kept.read_at = time.monotonic()
        self._kept[key] = kept
        while (
            len(self._kept) > 1 and sum(each.size for each in self._kept.values()) > MAX_KEPT_BYTES
        ):
            del self._kept[next(iter(self._kept))]
        return kept.source

    async def _text(self, ref: ToolRef, service: OpenApiService) -> tuple[bytes, str | None]:
        where = self._secrets.reveal(ref.shown, service.document)
        if where.lower().startswith(("http://", "https://")):
            return await self._download(ref, service)
        path = Path(where)
        return await in_thread(lambda: _file(service.document, path), service.document), None

    async def _download(self, ref: ToolRef, service: OpenApiService) -> tuple[bytes, str]:
        address = address_of(self._secrets, ref.shown, service.document)
        request = HttpRequest("GET", address.url, f"the document {service.document!r}")
        headers = dict(address.headers)
        if service.url is not None:
            own = address_of(self._secrets, ref.shown, service.url)
            if origin_of(own.url) == origin_of(address.url):
                headers |= dict(own.headers)
                headers |= dict(headers_of(self._secrets, ref.shown, service.headers))
        request = replace(request, headers=tuple(headers.items()))
        try:
            async with (
                asyncio.timeout(DOWNLOAD_TIMEOUT_S),
                self._clients.answer(ref.shown, request) as response,
            ):
                status = response.status_code
                if status in _PASSING_STATUS or status >= 500:
                    raise UnavailableError(f"{request.shown} answered {status}")
                if not response.is_success:
                    raise BadInputError(
                        f"{request.shown} answered {status} {response.reason_phrase}".rstrip(),
                        hint="look at `document` in the agent's tool; it is sent the tool's "
                        "`headers` only if `url` names the same host",
                    )
                told = response.headers.get("content-length", "")
                if told.isdecimal() and int(told[:18]) > MAX_DOCUMENT_BYTES:
                    raise _too_large(service.document, int(told[:18]))
                body, is_more = await read_body(ref.shown, response, MAX_DOCUMENT_BYTES)
        except TimeoutError:
            raise UnavailableError(
                f"{request.shown} has not come within {DOWNLOAD_TIMEOUT_S:g} s"
            ) from None
        if is_more:
            raise _too_large(f"{service.document} (read in part)", len(body) + 1)
        parts = urlsplit(address.url)
        return body, urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))


async def in_thread(work: Callable[[], T], document: str) -> T:
    """Do what takes long with a document; raises what that does, BadInputError if it is slow."""
    done = start_thread(work, "OpenAPI document")
    ended, _ = await asyncio.wait({done}, timeout=PARSE_TIMEOUT_S)
    if not ended:
        raise BadInputError(
            f"openapi {document!r}: reading it takes longer than {PARSE_TIMEOUT_S:g} s",
            hint="give it as JSON, which is read faster, or give a smaller document",
        )
    end = done.result()
    if end.error is not None:
        raise end.error
    found: T = end.value
    return found


def _parse(service: OpenApiService, raw: bytes, base: str | None) -> Source:
    document = parse_document(service.document, raw, base)
    given = frozenset(name.lower() for name in service.headers), frozenset(service.query)
    return Source(document, list_operations(document), given)


def _file(shown: str, path: Path) -> bytes:
    try:
        if not path.is_file():
            raise BadInputError(
                f"openapi {shown!r}: there is no such file",
                hint="give its absolute path; a relative one is seen from where the tool worker "
                "was started",
            )
        with path.open("rb") as stream:
            raw = stream.read(MAX_DOCUMENT_BYTES + 1)
        size = path.stat().st_size
    except (OSError, ValueError) as error:
        raise BadInputError(f"openapi {shown!r} cannot be read: {type(error).__name__}") from None
    if len(raw) > MAX_DOCUMENT_BYTES:
        raise _too_large(shown, max(size, len(raw)))
    return raw


def _too_large(shown: str, size: int) -> LimitExceededError:
    return LimitExceededError(
        f"the OpenAPI document {shown!r}",
        size,
        MAX_DOCUMENT_BYTES,
        "bytes",
        hint="cut it down to the operations that the agent needs",
    )
