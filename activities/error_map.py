"""Whose fault a tool's error is, and how Temporal is told: the one place that decides it.

| kind | what happened | what happens |
|---|---|---|
| TRANSIENT | network, timeout, 408, 425, 429, 5xx | Temporal retries, after `Retry-After` |
| MODEL | bad arguments, not found, the tool says no (other 4xx) | the text is the tool's result |
| PERMANENT | a bug, unauthorised, a result that is no text | fails once; the policy says for whom |

Errors are known by what they look like (`.response.status_code`, class names), since tools may use
any library. A tool's own exception class may carry `retryable = True` or `False`.
"""

from __future__ import annotations

import builtins
import errno
import socket
import ssl
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any

from temporalio.exceptions import ApplicationError

from activities.tool import ModelFaultError
from contracts.error import LimitExceededError, MusterError

MAX_TEXT_CHARS = 4_000
"""Error text that a model, a person and the event history get."""

MAX_BODY_CHARS = 1_000
"""Of an HTTP error's body."""

TRACE_FRAMES = 12
"""Innermost frames of a tool's bug that the log gets."""

MAX_RETRY_AFTER = timedelta(hours=1)
"""A server that asks for more patience than this is as good as down."""

TRANSIENT_TYPE = "ToolTransientError"
PERMANENT_TYPE = "ToolPermanentError"


class FailureKind(StrEnum):
    """Whose fault, hence what to do."""

    TRANSIENT = "transient"
    MODEL = "model"
    PERMANENT = "permanent"


@dataclass(frozen=True, slots=True)
class ToolFailure:
    """One failed attempt at a tool call: `text` says what happened, in bounded length."""

    kind: FailureKind
    text: str
    retry_after: timedelta | None = None


Scrub = Callable[[str], str]
"""Takes secrets out of a text. It comes before every cut, or half a secret would stay."""

_TRANSIENT_NAMES = frozenset(
    (
        "aiohttp.ClientConnectionError",
        "aiohttp.ClientPayloadError",
        "anthropic.APIConnectionError",
        "asyncpg.PostgresConnectionError",
        "botocore.EndpointConnectionError",
        "httpcore.NetworkError",
        "httpcore.RemoteProtocolError",
        "httpcore.TimeoutException",
        "http.IncompleteRead",
        "httpx.NetworkError",
        "httpx.RemoteProtocolError",
        "httpx.TimeoutException",
        "openai.APIConnectionError",
        "requests.ChunkedEncodingError",
        "requests.ConnectionError",
        "requests.Timeout",
        "urllib.URLError",
        "urllib3.ProtocolError",
        "urllib3.TimeoutError",
    )
)
"""Errors of common libraries, as `top-level package.class`, that do not say so by their base."""

_TRANSIENT_ERRNO = frozenset(
    (
        errno.EAGAIN,
        errno.EBUSY,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EMFILE,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ENFILE,
        errno.ENOBUFS,
    )
)

_NETWORK = (BlockingIOError, ConnectionError, InterruptedError, TimeoutError, socket.gaierror)

_MODEL_FAULTS = (
    ArithmeticError,
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    LookupError,
    NotADirectoryError,
    PermissionError,
    ValueError,
)

_TRANSIENT_STATUS = frozenset((408, 425, 429))
_PERMANENT_STATUS = frozenset((401, 402, 403, 407))


def classify(error: BaseException, scrub: Scrub = str) -> ToolFailure:
    """Return whose fault a tool's exception is, with a text that names its type and message."""
    if isinstance(error, BaseExceptionGroup):
        return _classify_group(error, scrub)
    if (status := _http_status(error)) is not None:
        return _classify_http(error, status, scrub)
    return ToolFailure(_kind(error), describe(error, scrub))


def describe(error: BaseException, scrub: Scrub = str) -> str:
    """Return `Type: message`, bounded, whatever the exception's own `__str__` does."""
    try:
        message = scrub(str(error))
    except Exception as broken:
        message = f"(its message cannot be made: {type(broken).__name__})"
    if isinstance(error, (MusterError, ModelFaultError)):
        return bounded(message)
    return bounded(f"{type(error).__name__}: {message}" if message else type(error).__name__)


def trace(error: BaseException, scrub: Scrub = str) -> str:
    """Return the innermost frames and the message for the log, bounded: either may be endless."""
    frames = "".join(traceback.format_tb(error.__traceback__, limit=-TRACE_FRAMES))
    return f"{describe(error, scrub)}\n{bounded(scrub(frames))}"


def bounded(text: str, max_chars: int = MAX_TEXT_CHARS) -> str:
    """Return text that fits everywhere: cut with a note of what is missing, valid UTF-8."""
    if len(text) > max_chars:
        text = f"{text[:max_chars]}… ({len(text) - max_chars:,} more characters)"
    return text.encode("utf-8", errors="replace").decode()


def application_error(error: MusterError, scrub: Scrub = str) -> ApplicationError:
    """Return one of our errors as Temporal's failure, with the hint as its detail."""
    return ApplicationError(
        bounded(scrub(error.message)),
        scrub(error.hint),
        type=type(error).__name__,
        non_retryable=not error.retryable,
    )


def tool_error(failure: ToolFailure) -> ApplicationError:
    """Return a failed tool call as Temporal's failure; only transient ones are tried again."""
    is_transient = failure.kind is FailureKind.TRANSIENT
    return ApplicationError(
        failure.text,
        type=TRANSIENT_TYPE if is_transient else PERMANENT_TYPE,
        non_retryable=not is_transient,
        next_retry_delay=failure.retry_after if is_transient else None,
    )


def _kind(error: BaseException) -> FailureKind:
    own_word = getattr(error, "retryable", None)
    if isinstance(own_word, bool) and isinstance(error, Exception):
        return FailureKind.TRANSIENT if own_word else FailureKind.PERMANENT
    if isinstance(error, ssl.SSLCertVerificationError | LimitExceededError):
        return FailureKind.PERMANENT
    if isinstance(error, _MODEL_FAULTS):
        return FailureKind.MODEL
    if _is_network(error):
        return FailureKind.TRANSIENT
    return FailureKind.PERMANENT


def _is_network(error: BaseException) -> bool:
    if isinstance(error, _NETWORK):
        return True
    names = {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in type(error).__mro__}
    is_temporary = isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO
    return bool(names & _TRANSIENT_NAMES) or is_temporary


def _classify_group(group: BaseExceptionGroup[BaseException], scrub: Scrub) -> ToolFailure:
    """Return the worst of a group's failures: a bug, else a transient error, else the model's."""
    members = [classify(member, scrub) for member in group.exceptions]
    order = (FailureKind.PERMANENT, FailureKind.TRANSIENT, FailureKind.MODEL)
    kind = min((member.kind for member in members), key=order.index)
    delays = [member.retry_after for member in members if member.retry_after is not None]
    text = "; ".join(member.text for member in members)
    return ToolFailure(kind, bounded(text), max(delays, default=None))


def _http_status(error: BaseException) -> int | None:
    """Return the HTTP status an exception carries, as httpx, requests, aiohttp, urllib … do."""
    if type(error).__module__ == builtins.__name__:
        return None
    places = (
        (getattr(error, "response", None), ("status_code", "status")),
        (error, ("status_code", "status", "code")),
    )
    for holder, names in places:
        for name in names:
            status = getattr(holder, name, None)
            if isinstance(status, int) and 100 <= status <= 599:
                return int(status)
    return None


def _classify_http(error: BaseException, status: int, scrub: Scrub) -> ToolFailure:
    text = describe(error, scrub)
    if body := _body(error, scrub):
        text = bounded(f"{text}: {body}")
    if status not in _TRANSIENT_STATUS and status < 500:
        own_fault = status in _PERMANENT_STATUS or status < 400
        return ToolFailure(FailureKind.PERMANENT if own_fault else FailureKind.MODEL, text)
    delay = _retry_after(error)
    if delay is not None and delay > MAX_RETRY_AFTER:
        wait_s, limit_s = delay.total_seconds(), MAX_RETRY_AFTER.total_seconds()
        asked = f"{text} (asks to wait {wait_s:,.0f} s, the limit is {limit_s:,.0f} s)"
        return ToolFailure(FailureKind.PERMANENT, asked)
    return ToolFailure(FailureKind.TRANSIENT, text, delay)


def _body(error: BaseException, scrub: Scrub) -> str:
    try:
        text = getattr(getattr(error, "response", None), "text", "")
    except Exception:  # a streamed body that nobody has read
        return ""
    if not isinstance(text, str):
        return ""
    return bounded(" ".join(scrub(text).split()), MAX_BODY_CHARS)


def _retry_after(error: BaseException) -> timedelta | None:
    for holder in (getattr(error, "response", None), error):
        headers = getattr(holder, "headers", None)
        value = _header(headers, "retry-after") if headers is not None else None
        if value is not None:
            return _delay(value)
    return None


def _header(headers: Any, name: str) -> str | None:
    items = headers.items() if isinstance(headers, Mapping) or hasattr(headers, "items") else ()
    for key, value in items:
        if isinstance(key, str) and key.lower() == name:
            return str(value)
    return None


def _delay(value: str) -> timedelta | None:
    """Return a Retry-After header's delay: seconds, or an HTTP date; None if it is neither."""
    try:
        return timedelta(seconds=max(float(value), 0.0))
    except (ValueError, OverflowError):
        pass
    try:
        when = parsedate_to_datetime(value)
    except (TypeError, ValueError):
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(when - datetime.now(UTC), timedelta(0))
