"""Requests to services that may do anything: hang, redirect, send too much, send garbage.

One request is one attempt: nothing is sent again here. Cookies are not kept, so that one call
leaves nothing to the next. A body is read up to a limit, counted after decompression, and the
connection of what is not read to its end is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import zlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from http.cookiejar import CookieJar, DefaultCookiePolicy
from urllib.parse import urljoin, urlsplit

import httpx

from contracts.error import BadInputError, MusterError, UnavailableError

CONNECT_TIMEOUT_S = 10.0
"""For one new connection; the tool's timeout bounds the rest."""

MAX_CONNECTIONS = 1_000
"""To one service: as many as one worker has calls."""

MAX_KEPT_CONNECTIONS = 20
"""Unused ones to one service, kept for a while."""

KEPT_S = 30.0
"""How long an unused connection is kept."""

MAX_CLIENTS = 64
"""Services that one worker keeps connections to; the unused ones are forgotten first."""

MAX_REDIRECTS = 5
"""Within one service; a sixth is an error."""

MAX_ERROR_BYTES = 16_000
"""Of the body of an answer that says no."""

USER_AGENT = "muster"
ENCODINGS = "gzip, deflate"

_SAFE = frozenset(("GET", "HEAD"))
_WINDOWS = {"gzip": (31,), "x-gzip": (31,), "deflate": (15, -15)}
"""How zlib shall read an encoding; servers send "deflate" with and without zlib's header."""


class AnswerError(MusterError):
    """A service answered with what cannot be read; another attempt would bring the same."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request; `shown` names it in errors, without what may be secret."""

    method: str
    url: str
    shown: str
    headers: tuple[tuple[str, str], ...] = ()
    content: bytes | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer whose status is an error, as `error_map` reads it."""

    status_code: int
    headers: Mapping[str, str]
    text: str


class HttpStatusError(Exception):
    """A service answered with an error status."""

    def __init__(self, message: str, response: Refusal) -> None:
        super().__init__(message)
        self.response = response


@dataclass(slots=True)
class _Client:
    http: httpx.AsyncClient
    calls: int = 0


class HttpClients:
    """A client for each service, which keeps a few connections."""

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}
        self._certificates: ssl.SSLContext | None = None

    async def close(self) -> None:
        """Close every connection."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.http.aclose()

    @contextlib.asynccontextmanager
    async def answer(self, tool: str, request: HttpRequest) -> AsyncIterator[httpx.Response]:
        """Send a request and yield the answer, its body unread.

        Redirects are followed within the service only. Raises UnavailableError where there is no
        answer, now or while the body is read, and BadInputError for a redirect elsewhere.
        """
        async with self._client(origin_of(request.url)) as client:
            try:
                for _ in range(MAX_REDIRECTS + 1):
                    async with client.stream(
                        request.method,
                        request.url,
                        headers=_encoded(request.headers),
                        content=request.content,
                    ) as response:
                        if not response.has_redirect_location:
                            yield response
                            return
                        request = _redirected(tool, request, response)
            except httpx.TransportError as error:
                raise _failure(tool, request, error) from None
            except httpx.InvalidURL as error:
                raise BadInputError(f"tool {tool!r}: its URL is not valid: {error}") from None
        raise BadInputError(
            f"tool {tool!r}: {request.shown} redirects more than {MAX_REDIRECTS} times",
            hint="ask the service for the address that it means",
        )

    @contextlib.asynccontextmanager
    async def _client(self, origin: str) -> AsyncIterator[httpx.AsyncClient]:
        found = self._clients.pop(origin, None) or _Client(self._new())
        self._clients[origin] = found  # the last one used stands last
        found.calls += 1
        try:
            await self._forget_unused()
            yield found.http
        finally:
            found.calls -= 1

    def _new(self) -> httpx.AsyncClient:
        if self._certificates is None:
            self._certificates = httpx.create_ssl_context()
        nothing = DefaultCookiePolicy(allowed_domains=[])
        return httpx.AsyncClient(
            verify=self._certificates,
            cookies=CookieJar(nothing),
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(
                max_connections=MAX_CONNECTIONS,
                max_keepalive_connections=MAX_KEPT_CONNECTIONS,
                keepalive_expiry=KEPT_S,
            ),
            headers={"User-Agent": USER_AGENT, "Accept-Encoding": ENCODINGS},
        )

    async def _forget_unused(self) -> None:
        for origin, client in list(self._clients.items()):
            if len(self._clients) <= MAX_CLIENTS:
                return
            if client.calls == 0:
                del self._clients[origin]
                await client.http.aclose()


def origin_of(url: str) -> str:
    """Return scheme, host and port of a URL, in one form; raises BadInputError if it has none."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadInputError(
            "an address is not an HTTP URL with a host", hint="write http://HOST or https://HOST"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port or (443 if parts.scheme == 'https' else 80)}"


async def read_body(tool: str, response: httpx.Response, limit: int) -> tuple[bytes, bool]:
    """Return at most `limit` bytes of a body, decompressed, and whether it has more.

    Raises AnswerError if it is not encoded as it says.
    """
    inflater = _inflater(tool, response)
    body = bytearray()
    async for chunk in response.aiter_raw():
        if inflater is None:
            body += chunk
        else:
            body += inflater.feed(chunk, limit + 1 - len(body))
        if len(body) > limit:
            return bytes(body[:limit]), True
        # A fast server leaves no moment in which another task would run.
        await asyncio.sleep(0)
    if inflater is not None:
        inflater.end()
    return bytes(body), False


async def refusal(request: HttpRequest, tool: str, response: httpx.Response) -> HttpStatusError:
    """Return the error that an answer with an error status is; some of its body is read."""
    try:
        body, _ = await read_body(tool, response, MAX_ERROR_BYTES)
    except (AnswerError, httpx.TransportError):
        body = b""
    text = body.decode(errors="replace")
    status = f"{response.status_code} {response.reason_phrase}".strip()
    return HttpStatusError(
        f"{request.shown} answered {status}",
        Refusal(response.status_code, dict(response.headers), text),
    )


class _Inflater:
    """Decompresses as much as there is room for, not as much as a bomb holds."""

    def __init__(self, tool: str, encoding: str) -> None:
        self._what = f"tool {tool!r}: the answer's body is not {encoding}, as it says"
        self._windows = list(_WINDOWS[encoding])
        self._zlib = zlib.decompressobj(self._windows.pop(0))
        self._begun = False
        self._members = 0

    def feed(self, data: bytes, room: int) -> bytes:
        """Return at most `room` bytes more."""
        found = bytearray()
        while data and len(found) < room:
            if self._zlib.eof:
                self._members += 1
                self._zlib = zlib.decompressobj(31)
            try:
                found += self._zlib.decompress(data, room - len(found))
            except zlib.error:
                if self._members:  # padding after the last member
                    break
                if self._begun or not self._windows:
                    raise AnswerError(self._what) from None
                self._zlib = zlib.decompressobj(self._windows.pop(0))
                continue
            self._begun = True
            data = self._zlib.unused_data if self._zlib.eof else self._zlib.unconsumed_tail
        return bytes(found)

    def end(self) -> None:
        """Check that nothing is missing."""
        if self._begun and not self._zlib.eof and not self._members:
            raise AnswerError(f"{self._what}: it ends in the middle")


def _inflater(tool: str, response: httpx.Response) -> _Inflater | None:
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in _WINDOWS:
        raise AnswerError(
            f"tool {tool!r}: the answer is encoded as {encoding[:40]!r}, which nobody asked for",
            hint=f"let the service heed Accept-Encoding, which was: {ENCODINGS}",
        )
    return _Inflater(tool, encoding)


def _encoded(headers: tuple[tuple[str, str], ...]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("ascii"), value.encode()) for name, value in headers]


def _redirected(tool: str, request: HttpRequest, response: httpx.Response) -> HttpRequest:
    """Return the request that a redirect asks for; raises BadInputError if we do not make it."""
    target = urljoin(request.url, response.headers["location"])
    status = response.status_code
    here, there = origin_of(request.url), _origin_or_none(target)
    if there != here and _plain(there) != here:
        raise BadInputError(
            f"tool {tool!r}: {request.shown} redirects to {there or 'no HTTP address'}, which is "
            f"another service than {here}",
            hint="what a call carries is for the service it names: if you mean the other one, "
            "name it in `url` or `document`",
        )
    if there != here or status in (307, 308) or request.method in _SAFE:
        return replace(request, url=target)
    if status == 303:
        kept = tuple(each for each in request.headers if each[0].lower() != "content-type")
        return replace(request, method="GET", url=target, headers=kept, content=None)
    raise BadInputError(
        f"tool {tool!r}: {request.shown} answered {status}, a redirect that may drop the body",
        hint="ask the service for the address that it means",
    )


def _plain(origin: str | None) -> str | None:
    """Return the origin from which a redirect to an HTTPS one is an upgrade of the same service."""
    if origin is None or not (origin.startswith("https://") and origin.endswith(":443")):
        return None
    return f"http://{origin.removeprefix('https://').removesuffix(':443')}:80"


def _origin_or_none(url: str) -> str | None:
    try:
        return origin_of(url)
    except BadInputError:
        return None


def _failure(tool: str, request: HttpRequest, error: httpx.TransportError) -> MusterError:
    where = origin_of(request.url)
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLCertVerificationError):
            return BadInputError(
                f"tool {tool!r}: the certificate of {where} is not valid: {seen.verify_message}",
                hint="trust its issuer with SSL_CERT_FILE where the tool worker is started",
            )
        seen = seen.__cause__ or seen.__context__
    if isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError):
        return BadInputError(f"tool {tool!r}: {request.shown} cannot be sent: {error}")
    reason = str(error) or type(error).__name__
    return UnavailableError(f"{request.shown}: no answer from {where}: {reason}")
