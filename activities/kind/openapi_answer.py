"""An answer of an HTTP service as what the model reads: text, bounded; what is no text is named."""

from __future__ import annotations

import codecs
import json
import re
from typing import NoReturn

import httpx

from activities.kind.http import HttpRequest, read_body, refusal
from activities.thread import start_thread
from contracts.error import LimitExceededError

SMALL_BYTES = 100_000
"""A larger body is made into text in a thread: it takes longer than the event loop may stand."""

_BINARY = re.compile(
    r"^(?:image/(?!svg)|audio/|video/|font/|multipart/|application/(?:pdf|zip|gzip|x-tar|x-7z.*|"
    r"vnd\.(?:ms-|openxmlformats).*|x-protobuf|protobuf|grpc.*|wasm|java-archive)$)"
)
_TEXT = re.compile(
    r"^(?:text/|image/svg|[^/]+/(?:[^;]*\+)?(?:json|xml|yaml|csv)$|"
    r"application/(?:x-ndjson|javascript|graphql|x-www-form-urlencoded|x-yaml|jsonl?|toml)$)"
)
_CHARSETS = re.compile(
    r"^(?:utf[_-]?(?:8|16|32).*|ascii|us-ascii|latin-?1|iso-?8859-?\d+|(?:windows-|cp)\d+|gb.*|"
    r"big5.*|shift_?jis|euc[_-].*|koi8-[ru])$"
)
"""Of Python's codecs those that are character sets."""


async def read_answer(
    tool: str, request: HttpRequest, response: httpx.Response, max_bytes: int
) -> str:
    """Return an answer as text.

    Raises HttpStatusError for a status that is an error, LimitExceededError for a body over
    `max_bytes`, AnswerError for one that is not encoded as it says.
    """
    if not response.is_success:
        raise await refusal(request, tool, response)
    kind, _, options = response.headers.get("content-type", "").lower().partition(";")
    kind = kind.strip()
    told = _told_size(response)
    if request.method == "HEAD":
        size = "" if told is None else f", {told:,} bytes"
        return f"{_status(response)} ({kind or 'no type'}{size})"
    if _BINARY.match(kind):
        return _named(kind, "" if told is None else f"{told:,} bytes")
    if told is not None and told > max_bytes:
        _refuse(f"the result of tool {tool!r}", told, max_bytes)
    body, is_more = await read_body(tool, response, max_bytes)
    if is_more:
        _refuse(f"the result of tool {tool!r} (read in part)", len(body) + 1, max_bytes)
    if not body:
        where = response.headers.get("location")
        return f"{_status(response)}, no content" + (f"; Location: {where[:500]}" if where else "")
    charset = re.search(r"charset\s*=\s*\"?([\w.:-]+)", options)
    name = charset[1] if charset else ""
    if len(body) <= SMALL_BYTES:
        return _text(body, kind, name)
    ended = await start_thread(lambda: _text(body, kind, name), f"read answer of {tool}")
    if ended.error is not None:
        raise ended.error
    text: str = ended.value
    return text


def _text(body: bytes, kind: str, charset: str) -> str:
    """Return a body as text; JSON without spaces, if it is any."""
    if not _TEXT.match(kind):
        if b"\0" in body:
            return _named(kind or "no type", f"{len(body):,} bytes")
        try:
            body.decode()
        except UnicodeDecodeError:
            if not charset:
                return _named(kind or "no type", f"{len(body):,} bytes")
    text = _decoded(body, charset)
    return _compact(text) if kind.endswith("json") else text


def _decoded(body: bytes, charset: str) -> str:
    if _CHARSETS.match(charset):
        try:
            return body.decode(codecs.lookup(charset).name, errors="replace")
        except (LookupError, UnicodeError):
            pass
    return body.decode("utf-8-sig", errors="replace")


def _compact(text: str) -> str:
    """Return JSON without what is there to be looked at; what is not JSON, as it is."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        found = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        found.encode()
    except (ValueError, RecursionError):
        return text
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _told_size(response: httpx.Response) -> int | None:
    """Return how many bytes the body has by its header, if it is not compressed."""
    told = response.headers.get("content-length", "")
    encoding = response.headers.get("content-encoding", "").strip().lower()
    return int(told) if re.fullmatch(r"\d{1,18}", told) and encoding in ("", "identity") else None


def _status(response: httpx.Response) -> str:
    return f"{response.status_code} {response.reason_phrase}".strip()


def _named(kind: str, size: str) -> str:
    return f"(the answer is no text but {kind}{', ' if size else ''}{size})"


def _refuse(what: str, size: int, limit: int) -> NoReturn:
    raise LimitExceededError(
        what,
        size,
        limit,
        "bytes",
        hint="ask for less, or raise `max_result_bytes` in the agent's tool",
    )
