"""Which server is meant, for whom: what two calls must have in common to share a session."""

from __future__ import annotations

from dataclasses import dataclass, field

import httpx2

from activities.secret import Secrets
from contracts.agent import ToolRef
from contracts.error import BadInputError

MAX_SHOWN_CHARS = 200
"""How much of a command line or URL an error text shows."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An MCP server as one tenant may use it, secrets in place: it stays in memory.

    All but `shown` are compared, so another tenant, argument or secret is another endpoint.
    """

    tenant: str
    shown: str = field(compare=False)
    command: tuple[str, ...] = field(default=(), repr=False)
    env: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    url: str = field(default="", repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)


def endpoint_of(ref: ToolRef, tenant: str, secrets: Secrets) -> Endpoint:
    """Return a tool's server with its secrets in place; raises BadInputError."""
    server = ref.mcp
    assert server is not None
    shown = ref.origin if len(ref.origin) <= MAX_SHOWN_CHARS else f"{ref.origin[:MAX_SHOWN_CHARS]}…"
    url = secrets.reveal(ref.shown, server.url or "")
    if url and not _is_http(url):
        raise BadInputError(
            f"MCP server {shown!r}: its URL names no host to be asked over HTTP",
            hint="write the endpoint of its streamable HTTP transport: https://HOST/PATH",
        )
    headers = secrets.reveal_all(ref.shown, server.headers)
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable() and name.isascii() and name.isprintable()):
            raise BadInputError(
                f"MCP server {shown!r}: the header {name!r} has characters that HTTP cannot carry",
                hint="a header is printable ASCII, on one line",
            )
    command = tuple(secrets.reveal(ref.shown, each) for each in server.command)
    env = secrets.reveal_all(ref.shown, server.env)
    if any("\0" in each for each in (*command, *env, *env.values())) or any(
        not name or "=" in name for name in env
    ):
        raise BadInputError(
            f"MCP server {shown!r}: its command or `env` is none that a program can be started with"
        )
    return Endpoint(
        tenant=tenant,
        shown=shown,
        command=command,
        env=tuple(sorted(env.items())),
        url=url,
        headers=tuple(sorted(headers.items())),
    )


def _is_http(url: str) -> bool:
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL:
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.host)
