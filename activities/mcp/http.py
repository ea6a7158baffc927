"""HTTP to an MCP server, bounded, with what the SDK does not hand on: status, headers, body.

The SDK makes every refused request into one and the same error, and an error on the connection
ends its session. So the connection below it notes what happened to a request in the `Exchange` of
whoever made it, and answers for a server that cannot be reached.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from http.client import responses

import httpx2

from activities.mcp.endpoint import Endpoint
from contracts.error import BadInputError, UnavailableError
from contracts.limit import HARD_TOOL_RESULT_BYTES

MAX_MESSAGE_BYTES = 2 * HARD_TOOL_RESULT_BYTES
"""One answer of a server: escaped as JSON, a text is larger than it is."""

MAX_ERROR_BYTES = 65_536
"""Body of an error."""

TIMEOUT = httpx2.Timeout(10.0, read=None)
"""Seconds to connect and to send; how long an answer may take is the tool's own timeout."""

LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
"""Each call holds a connection; how many there are is the tool worker's limit on calls."""


class HttpError(Exception):
    """An MCP server refuses a request; `response` says how (see `error_map`)."""

    def __init__(self, shown: str, response: httpx2.Response) -> None:
        status = response.status_code
        phrase = responses.get(status, "")
        super().__init__(f"MCP server {shown!r} answers {status} {phrase}".rstrip())
        self.response = response


@dataclass(slots=True)
class Exchange:
    """What became of the last request that was made in this context."""

    failure: Exception | None = None


exchange: ContextVar[Exchange | None] = ContextVar("mcp_exchange", default=None)


def http_client(endpoint: Endpoint) -> httpx2.AsyncClient:
    """Return a client for one server; it asks for plain answers, so that bytes can be counted."""
    return httpx2.AsyncClient(
        transport=_NotingTransport(endpoint.shown),
        headers={"accept-encoding": "identity", **dict(endpoint.headers)},
        timeout=TIMEOUT,
    )


class _NotingTransport(httpx2.AsyncBaseTransport):
    """Notes in the current exchange how the last message fared."""

    def __init__(self, shown: str) -> None:
        self._shown = shown
        self._inner = httpx2.AsyncHTTPTransport(limits=LIMITS)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; a message (POST) that gets no answer is answered with 503."""
        current = exchange.get() if request.method == "POST" else None
        try:
            response = await self._inner.handle_async_request(request)
        except httpx2.TransportError as error:
            if request.method != "POST":
                raise
            if current is not None:
                current.failure = self._unreachable(error)
            return httpx2.Response(HTTPStatus.SERVICE_UNAVAILABLE, request=request)
        if current is not None:
            current.failure = None
        if response.status_code < HTTPStatus.BAD_REQUEST:
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = _Bounded(response.stream, self._shown, current)
            return response
        refused = httpx2.Response(
            response.status_code,
            headers=response.headers,
            content=await _beginning(response),
            request=request,
        )
        if current is not None:
            current.failure = HttpError(self._shown, refused)
        return refused

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()

    def _unreachable(self, error: httpx2.TransportError) -> Exception:
        is_refused = isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout))
        happened = "cannot be reached" if is_refused else "gave no answer"
        what = f"MCP server {self._shown!r} {happened}: {type(error).__name__}: {error}"
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
            causes.append(cause)
        if any(isinstance(each, ssl.SSLCertVerificationError) for each in causes):
            return BadInputError(what, hint="its certificate is not trusted on this machine")
        return UnavailableError(what)


class _Bounded(httpx2.AsyncByteStream):
    """A body of at most so many bytes; of a stream of events, those until the answer."""

    def __init__(self, inner: httpx2.AsyncByteStream, shown: str, current: Exchange | None) -> None:
        self._inner, self._shown, self._current = inner, shown, current

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        try:
            async for chunk in self._inner:
                size += len(chunk)
                if size > MAX_MESSAGE_BYTES:
                    limit = f"{MAX_MESSAGE_BYTES:,} bytes"
                    raise self._broken(
                        BadInputError(f"MCP server {self._shown!r} answers more than {limit}")
                    )
                yield chunk
        except httpx2.TransportError as error:
            raise self._broken(
                UnavailableError(
                    f"MCP server {self._shown!r} broke off its answer: {type(error).__name__}"
                )
            ) from None

    async def aclose(self) -> None:
        """Close the body."""
        await self._inner.aclose()

    def _broken(self, failure: Exception) -> httpx2.StreamError:
        """Note the failure, and return what the SDK takes for the end of one answer only."""
        if self._current is not None:
            self._current.failure = failure
        return httpx2.StreamError(str(failure))


async def _beginning(response: httpx2.Response) -> bytes:
    """Return the beginning of a body, and close it; what breaks off is as long as it got."""
    body = b""
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    try:
        async for chunk in response.stream:
            body += chunk
            if len(body) >= MAX_ERROR_BYTES:
                break
    except httpx2.TransportError:
        pass
    finally:
        await response.aclose()
    return body[:MAX_ERROR_BYTES]
