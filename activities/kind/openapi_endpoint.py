"""Where a service is, and what an agent file sends it: addresses and headers with secrets in place.

A document that came from one host may name another one as its server. It gets no secret unless the
agent file says `url`: else whoever writes the document would choose who gets them.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

from activities.kind.http import origin_of
from activities.kind.openapi_operation import TOKEN
from activities.kind.openapi_request import Endpoint
from activities.secret import REFERENCE, Secrets
from contracts.agent import ToolRef
from contracts.error import BadInputError
from contracts.tool_source import OpenApiService

_HOST = re.compile(r"^[^\s/@?#\\]+$")


@dataclass(frozen=True, slots=True)
class Address:
    """A URL with secrets in place, without its user and password: these are a header."""

    url: str
    headers: tuple[tuple[str, str], ...] = ()


def address_of(secrets: Secrets, tool: str, text: str) -> Address:
    """Return a URL of an agent file; each secret stays within its part of it.

    Raises BadInputError for what is no HTTP URL.
    """
    whole = secrets.reveal(tool, text) if REFERENCE.match(text) else text

    def put(part: str) -> str:
        return REFERENCE.sub(lambda found: quote(secrets.reveal(tool, found[0]), safe=""), part)

    try:
        parts = urlsplit(whole)
    except ValueError:
        raise _no_url(tool) from None
    user_info, _, host = parts.netloc.rpartition("@")
    host = secrets.reveal(tool, host)
    path = REFERENCE.sub(lambda found: quote(secrets.reveal(tool, found[0]), safe="/:"), parts.path)
    url = urlunsplit((parts.scheme, host, path, put(parts.query), ""))
    try:
        is_url = _HOST.match(host) is not None and bool(origin_of(url))
    except BadInputError:
        is_url = False
    if not is_url:
        raise _no_url(tool)
    return Address(url, _basic(secrets, tool, user_info) if user_info else ())


def endpoint_of(
    secrets: Secrets, ref: ToolRef, service: OpenApiService, server: str | None, base: str | None
) -> Endpoint:
    """Return where calls go; `server` is what the document says, `base` the document's own URL.

    Raises BadInputError where that is not known, or is not who should get secrets.
    """
    if service.url is not None:
        address = address_of(secrets, ref.shown, service.url)
    else:
        address = Address(_server(ref, service, server, base))
    headers = headers_of(secrets, ref.shown, service.headers)
    named = {name.lower() for name, _ in headers}
    headers += tuple(each for each in address.headers if each[0].lower() not in named)
    query = tuple(secrets.reveal_all(ref.shown, service.query).items())
    return Endpoint(address.url, headers, query)


def headers_of(
    secrets: Secrets, tool: str, headers: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """Return headers with secrets in place; raises BadInputError for what is none."""
    found = tuple(secrets.reveal_all(tool, headers).items())
    for name, value in found:
        if not TOKEN.match(name):
            raise BadInputError(f"tool {tool!r}: {name!r} is no name of a header")
        if re.search(r"[\x00-\x1f\x7f]", value):
            raise BadInputError(
                f"tool {tool!r}: the value of header {name!r} has line breaks or other controls",
                hint="look at the variable or the file that it refers to",
            )
    return tuple((name, value.strip()) for name, value in found)


def _server(ref: ToolRef, service: OpenApiService, server: str | None, base: str | None) -> str:
    hint = "give the service's address as `url`"
    if base is None and (server is None or not urlsplit(server).netloc):
        raise BadInputError(
            f"openapi {service.document!r} does not say at which host the service is", hint=hint
        )
    url = urljoin(base or "", server or "/")
    try:
        origin = origin_of(url)
    except BadInputError:
        raise BadInputError(
            f"openapi {service.document!r}: its server {server!r} is no HTTP URL", hint=hint
        ) from None
    values = (*service.headers.values(), *service.query.values())
    is_secret = any(REFERENCE.search(value) for value in values)
    if base is not None and is_secret and origin != origin_of(base):
        raise BadInputError(
            f"openapi {service.document!r} comes from {origin_of(base)} and names {origin} as its "
            "server: that one is not sent the tool's secrets unasked",
            hint=f"if it should get them, add `url: {origin}` (and the path, if there is one)",
        )
    return url


def _basic(secrets: Secrets, tool: str, user_info: str) -> tuple[tuple[str, str], ...]:
    def plain(part: str) -> str:
        return secrets.reveal(tool, part) if REFERENCE.search(part) else unquote(part)

    # A reference has a colon of its own.
    found = re.match(r"((?:\$\{[^{}]*\}|[^:])*)(?::(.*))?$", user_info)
    assert found is not None
    pair = f"{plain(found[1])}:{plain(found[2] or '')}"
    token = base64.b64encode(pair.encode()).decode()
    if REFERENCE.search(user_info):
        secrets.remember(token)
    return (("Authorization", f"Basic {token}"),)


def _no_url(tool: str) -> BadInputError:
    return BadInputError(
        f"tool {tool!r}: its address is not an HTTP URL with a host",
        hint="write http://HOST or https://HOST; a secret may stand in the host, the path, the "
        "query, or be the whole address",
    )
