"""Whose fault an error is, whatever library it comes from."""

from __future__ import annotations

import errno
import socket
import ssl
import urllib.error
from datetime import UTC, datetime, timedelta
from email.message import Message as Headers
from email.utils import format_datetime
from types import SimpleNamespace

import httpx
import pytest

from activities.error_map import FailureKind, application_error, bounded, classify
from contracts.error import BadInputError, UnavailableError

TRANSIENT, MODEL, PERMANENT = FailureKind.TRANSIENT, FailureKind.MODEL, FailureKind.PERMANENT
REQUEST = httpx.Request("GET", "http://example.test/")


class ClientResponseError(Exception):
    """Looks like aiohttp's: the status and headers are its own."""

    status: int
    headers: dict[str, str]


def _status(status: int, headers: dict[str, str] | None = None, text: str = "") -> Exception:
    response = httpx.Response(status, headers=headers, text=text, request=REQUEST)
    return httpx.HTTPStatusError(f"status {status}", request=REQUEST, response=response)


def _aiohttp_like(status: int) -> Exception:
    error = ClientResponseError("aiohttp")
    error.status, error.headers = status, {"Retry-After": "7"}
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (_status(400), MODEL),
        (_status(401), PERMANENT),
        (_status(403), PERMANENT),
        (_status(404), MODEL),
        (_status(408), TRANSIENT),
        (_status(409), MODEL),
        (_status(422), MODEL),
        (_status(429), TRANSIENT),
        (_status(500), TRANSIENT),
        (_status(503), TRANSIENT),
        (_status(302), PERMANENT),
        (_aiohttp_like(503), TRANSIENT),
        (urllib.error.HTTPError("http://x", 503, "busy", Headers(), None), TRANSIENT),
        (urllib.error.URLError("unreachable"), TRANSIENT),
        (httpx.ConnectError("refused"), TRANSIENT),
        (httpx.ReadTimeout("slow"), TRANSIENT),
        (httpx.RemoteProtocolError("cut"), TRANSIENT),
        (httpx.UnsupportedProtocol("ftp"), PERMANENT),
        (ConnectionRefusedError("refused"), TRANSIENT),
        (TimeoutError(), TRANSIENT),
        (socket.gaierror(socket.EAI_AGAIN, "try again"), TRANSIENT),
        (OSError(errno.EHOSTUNREACH, "no route"), TRANSIENT),
        (OSError(errno.ENOSPC, "disk full"), PERMANENT),
        (ssl.SSLCertVerificationError("self-signed"), PERMANENT),
        (ValueError("no"), MODEL),
        (KeyError("x"), MODEL),
        (FileNotFoundError(errno.ENOENT, "no such file", "a.txt"), MODEL),
        (PermissionError(errno.EACCES, "denied"), MODEL),
        (ZeroDivisionError("division by zero"), MODEL),
        (TypeError("bug"), PERMANENT),
        (NotImplementedError(), PERMANENT),
        (MemoryError(), PERMANENT),
        (BadInputError("wrong"), PERMANENT),
        (UnavailableError("away"), TRANSIENT),
        (ExceptionGroup("g", [ValueError("a"), KeyError("b")]), MODEL),
        (ExceptionGroup("g", [ValueError("a"), TimeoutError()]), TRANSIENT),
        (ExceptionGroup("g", [TypeError("a"), TimeoutError()]), PERMANENT),
    ],
    ids=repr,
)
def test_errors_are_sorted_by_whose_fault_they_are(error: Exception, kind: FailureKind) -> None:
    assert classify(error).kind is kind


@pytest.mark.parametrize(
    ("value", "delay"),
    [
        ("5", timedelta(seconds=5)),
        ("0.5", timedelta(seconds=0.5)),
        ("-3", timedelta(0)),
        ("soon", None),
        ("nan", None),
        ("inf", None),
        ("", None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", timedelta(0)),
    ],
)
def test_retry_after_is_read_or_ignored(value: str, delay: timedelta | None) -> None:
    failure = classify(_status(503, {"Retry-After": value}))
    assert (failure.kind, failure.retry_after) == (TRANSIENT, delay)


def test_retry_after_may_be_a_date_to_come() -> None:
    when = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    delay = classify(_status(429, {"retry-after": when})).retry_after
    assert delay is not None
    assert timedelta(seconds=50) < delay <= timedelta(seconds=60)


def test_retry_after_beyond_the_limit_is_permanent_and_says_so() -> None:
    failure = classify(_status(503, {"Retry-After": "86400"}))
    assert failure.kind is PERMANENT
    assert "asks to wait 86,400 s, the limit is 3,600 s" in failure.text


def test_headers_are_found_on_the_error_itself() -> None:
    assert classify(_aiohttp_like(503)).retry_after == timedelta(seconds=7)


def test_body_of_an_http_error_is_shown_in_bounds() -> None:
    text = classify(_status(404, text="no such\n customer " + "x" * 5_000)).text
    assert text.startswith("HTTPStatusError: status 404: no such customer xxx")
    assert len(text) < 1_200


def test_body_that_cannot_be_read_is_left_out() -> None:
    response = SimpleNamespace(status_code=404, headers={}, text=None)
    error: Exception = type("OddError", (Exception,), {"response": response})("odd")
    assert classify(error).text == "OddError: odd"


def test_our_errors_travel_with_type_hint_and_retryability() -> None:
    error = application_error(UnavailableError("away", hint="wait"))
    assert (error.message, error.details, error.type) == ("away", ("wait",), "UnavailableError")
    assert not error.non_retryable
    assert application_error(BadInputError("wrong")).non_retryable


def test_bounded_text_says_how_much_is_missing() -> None:
    assert bounded("x" * 12, 10) == "x" * 10 + "… (2 more characters)"
