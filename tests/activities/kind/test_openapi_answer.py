"""What a service may answer: too much, garbage, nothing, never; and what is read of it."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
import zlib
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from activities.error_map import FailureKind, classify
from activities.kind.http import AnswerError, HttpStatusError
from activities.kind.openapi import OpenApiTools
from contracts.error import BadInputError, LimitExceededError, UnavailableError
from tests.activities.kind.calling import ask, shop, tools
from tests.activities.kind.service import (
    Answer,
    Seen,
    Service,
    body,
    document,
    drop,
    flood,
    hang,
    http,
    running,
    service,
)

__all__ = ["service", "tools"]

JSON, PLAIN, BYTES = "application/json", "text/plain", "application/octet-stream"
NO_TEXT = "(the answer is no text but"
ONE: dict[str, Any] = {"a": 1}
GIGABYTE = 1_000_000_000


async def call(tools: OpenApiTools, service: Service, *answers: Answer, **policy: Any) -> Any:
    """Return what the model reads of an answer to `GET /x`."""
    service.serve(document(get_x={}))
    service.answers["/x"] = answers
    return await ask(tools, shop(service, remote="get_x", **policy))


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        (http('{\n "a": [1, 2.0, "ü"]\n}', content_type=JSON), '{"a":[1,2.0,"ü"]}'),
        (http('{"a": NaN}', content_type=JSON), '{"a": NaN}'),
        (http('{"a": 1e999}', content_type=JSON), '{"a": 1e999}'),
        (http('{"a": ', content_type=JSON), '{"a": '),
        (http('"\\ud800"', content_type=JSON), '"\\ud800"'),
        (http("[" * 100_000, content_type=JSON), "[" * 100_000),
        (http("é".encode("latin-1"), content_type=f"{PLAIN}; charset=ISO-8859-1"), "é"),
        (http("é".encode("latin-1"), content_type=f'{PLAIN}; charset="latin1"'), "é"),
        (http("é".encode(), content_type=f"{PLAIN}; charset=unicode_escape"), "é"),
        (http("é".encode(), content_type=f"{PLAIN}; charset=klingon"), "é"),
        (http(b"a\xff\xfeb", content_type=PLAIN), "a��b"),
        (http(b"\xef\xbb\xbfa", content_type=PLAIN), "a"),
        (http("as it is"), "as it is"),
        (http("<p>page</p>", content_type="text/html"), "<p>page</p>"),
        (http(status="204 No Content"), "204 No Content, no content"),
        (http(status="201 Created", location="/x/7"), "201 Created, no content; Location: /x/7"),
        (http(b"\x89PNG", content_type="image/png"), f"{NO_TEXT} image/png, 4 bytes)"),
        (http(b"\0\1", content_type=BYTES), f"{NO_TEXT} {BYTES}, 2 bytes)"),
        (http(b"\x89\xff"), f"{NO_TEXT} no type, 2 bytes)"),
        (http("text", content_type=BYTES), "text"),
    ],
)
async def test_answer_is_read_as_text_or_named(
    tools: OpenApiTools, service: Service, answer: bytes, read: str
) -> None:
    assert await call(tools, service, answer) == read


async def test_large_answer_is_read_whole_up_to_the_limit(
    tools: OpenApiTools, service: Service
) -> None:
    value = {"numbers": list(range(100_000))}
    answer = http(json.dumps(value), content_type=JSON)
    read = await call(tools, service, answer, max_result_bytes=1_000_000)
    assert json.loads(read) == value


@pytest.mark.parametrize("is_told", [True, False])
async def test_answer_of_a_gigabyte_is_one_clear_error_and_not_read_to_its_end(
    tools: OpenApiTools, service: Service, is_told: bool
) -> None:
    length = f"Content-Length: {GIGABYTE}" if is_told else "Connection: close"
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n{length}\r\n\r\n".encode()
    play = flood(head, b"x" * 1_000_000, 1_000)
    tracemalloc.start()
    with pytest.raises(LimitExceededError, match="the limit is 256,000 bytes") as caught:
        await call(tools, service, play)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000_000
    assert caught.value.size == (GIGABYTE if is_told else 256_001)
    assert classify(caught.value).kind is FailureKind.PERMANENT
    await service.ended.wait()


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_body_that_unpacks_to_a_gigabyte_takes_no_memory(
    tools: OpenApiTools, service: Service, encoding: str
) -> None:
    packer = zlib.compressobj(1, wbits=31 if encoding == "gzip" else 15)
    zeros = b"\0" * 10_000_000
    packed = b"".join(packer.compress(zeros) for _ in range(100)) + packer.flush()
    assert len(packed) < GIGABYTE / 200
    tracemalloc.start()
    with pytest.raises(LimitExceededError, match="the limit is 256,000 bytes"):
        await call(tools, service, http(packed, content_encoding=encoding, content_type=PLAIN))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000_000


def raw_deflate(text: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(text) + packer.flush()


@pytest.mark.parametrize(
    ("packed", "encoding", "read"),
    [
        (gzip.compress(b"text" * 1_000), "gzip", "text" * 1_000),
        (gzip.compress(b"two ") + gzip.compress(b"members"), "gzip", "two members"),
        (gzip.compress(b"padded") + b"\0" * 100, "gzip", "padded"),
        (gzip.compress(b""), "gzip", "200 OK, no content"),
        (zlib.compress(b"text"), "deflate", "text"),
        (raw_deflate(b"text"), "deflate", "text"),
        (b"text", "identity", "text"),
    ],
)
async def test_packed_answer_is_unpacked(
    tools: OpenApiTools, service: Service, packed: bytes, encoding: str, read: str
) -> None:
    answer = http(packed, content_encoding=encoding, content_type=PLAIN)
    assert await call(tools, service, answer) == read


@pytest.mark.parametrize(
    ("packed", "encoding", "problem"),
    [
        (b"no gzip at all", "gzip", "is not gzip, as it says"),
        (gzip.compress(b"text" * 1_000)[:-20], "gzip", "ends in the middle"),
        (b"what is it", "br", "encoded as 'br', which nobody asked for"),
        (gzip.compress(gzip.compress(b"x")), "gzip, gzip", "which nobody asked for"),
    ],
)
async def test_body_that_is_not_packed_as_it_says_is_one_clear_error(
    tools: OpenApiTools, service: Service, packed: bytes, encoding: str, problem: str
) -> None:
    answer = http(packed, content_encoding=encoding, content_type=PLAIN)
    with pytest.raises(AnswerError, match=problem) as caught:
        await call(tools, service, answer)
    assert classify(caught.value).kind is FailureKind.PERMANENT
    refused = http(packed, "404 Not Found", content_encoding=encoding)
    with pytest.raises(HttpStatusError, match="404 Not Found"):
        await call(tools, service, refused)


@pytest.mark.parametrize(
    "answer",
    [
        drop,
        b"\x00\xff garbage \r\n\r\n",
        b"HTTP/1.1 999999 What\r\n\r\n",
        flood(b"HTTP/1.1 200 OK\r\n", b"X-Long: " + b"x" * 50_000, 10),
        flood(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n", b"short", 1),
        flood(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"zz\r\n", 3),
    ],
    ids=["dropped", "garbage", "status", "headers", "cut", "chunks"],
)
async def test_broken_answer_may_pass(
    tools: OpenApiTools, service: Service, answer: Answer
) -> None:
    with pytest.raises(UnavailableError, match="GET /x: no answer from http://127") as caught:
        await call(tools, service, answer)
    assert classify(caught.value).kind is FailureKind.TRANSIENT
    assert len(service.calls()) == 1, "nothing is sent again behind the back of Temporal"


async def test_service_that_is_away_may_come_back(tools: OpenApiTools, service: Service) -> None:
    service.serve(document(get_x={}))
    ref = shop(service, url="http://127.0.0.1:9", remote="get_x")
    with pytest.raises(UnavailableError, match=r"no answer from http://127\.0\.0\.1:9") as caught:
        await ask(tools, ref)
    assert classify(caught.value).kind is FailureKind.TRANSIENT


async def test_cancelled_call_closes_its_connection(tools: OpenApiTools, service: Service) -> None:
    calling = asyncio.create_task(call(tools, service, hang))
    async with asyncio.timeout(10):
        while not service.calls():
            await asyncio.sleep(0.01)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await service.ended.wait()


async def test_error_that_has_no_end_is_told_by_its_beginning(
    tools: OpenApiTools, service: Service
) -> None:
    head = b"HTTP/1.1 422 Wrong\r\nConnection: close\r\n\r\n"
    with pytest.raises(HttpStatusError) as caught:
        await call(tools, service, flood(head, b"no such fruit " * 10_000, 1_000))
    failure = classify(caught.value)
    assert failure.kind is FailureKind.MODEL
    assert "GET /x answered 422 Wrong: no such fruit no such" in failure.text
    assert len(failure.text) < 1_200


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [("7", 7.0), ("0", 0.0), ("-3", 0.0), ("soon", None), ("date", 30.0), ("nan", None)],
)
async def test_delay_that_a_service_asks_for_is_kept(
    tools: OpenApiTools, service: Service, asked: str, seconds: float | None
) -> None:
    if asked == "date":
        asked = format_datetime(datetime.now(UTC) + timedelta(seconds=30.9), usegmt=True)
    with pytest.raises(HttpStatusError) as caught:
        await call(tools, service, http("", "429 Too Many Requests", retry_after=asked))
    failure = classify(caught.value)
    assert failure.kind is FailureKind.TRANSIENT
    if seconds is None:
        assert failure.retry_after is None
    else:
        assert failure.retry_after is not None
        assert failure.retry_after.total_seconds() == pytest.approx(seconds, abs=2)


async def test_delay_that_is_too_long_is_as_good_as_down(
    tools: OpenApiTools, service: Service
) -> None:
    with pytest.raises(HttpStatusError) as caught:
        await call(tools, service, http("", "503 Down", retry_after="86400"))
    assert classify(caught.value).kind is FailureKind.PERMANENT


def moved(to: str, status: str = "307 Temporary Redirect") -> bytes:
    return http("", status, location=to)


@pytest.mark.parametrize(
    ("method", "status", "again", "content"),
    [
        ("get", "301 Moved", "GET", b""),
        ("get", "307 Moved", "GET", b""),
        ("post", "303 See Other", "GET", b""),
        ("post", "307 Moved", "POST", b'{"a":1}'),
        ("put", "308 Moved", "PUT", b'{"a":1}'),
    ],
)
async def test_redirect_within_the_service_is_followed(
    tools: OpenApiTools, service: Service, method: str, status: str, again: str, content: bytes
) -> None:
    sent: dict[str, Any] = (
        {} if method == "get" else {"requestBody": body({"properties": {"a": {}}})}
    )
    service.serve(document({f"{method}_x": sent}), there=http("moved", content_type=PLAIN))
    service.answers["/x"] = [moved("/there?y=1", status)]
    ref = shop(service, headers={"X-Key": "K"}, remote=f"{method}_x")
    assert await ask(tools, ref, **({} if method == "get" else ONE)) == "moved"
    last = service.last
    assert (last.method, last.target, last.body) == (again, "/there?y=1", content)
    assert last.headers["x-key"] == "K"
    assert _keys(service.calls()) == ([None] * 2 if method == "get" else ["job-1/b/1/0"] * 2)


def _keys(calls: list[Seen]) -> list[str | None]:
    return [each.headers.get("idempotency-key") for each in calls]


async def test_redirect_that_may_drop_the_body_is_not_followed(
    tools: OpenApiTools, service: Service
) -> None:
    service.serve(document(post_x={}), x=moved("/there", "302 Found"))
    with pytest.raises(BadInputError, match="answered 302, a redirect that may drop the body"):
        await ask(tools, shop(service, remote="post_x"))
    assert len(service.calls()) == 1


async def test_redirect_to_another_service_is_not_followed(
    tools: OpenApiTools, service: Service
) -> None:
    async with running() as other:
        other.answers["/x"] = [http("got you")]
        for to in (f"{other.url}/x", f"//{other.url[7:]}/x", "file:///etc/passwd"):
            with pytest.raises(BadInputError, match=r"redirects to .*, which is another service"):
                await call(tools, service, moved(to))
    assert other.seen == []


async def test_redirects_without_end_are_one_clear_error(
    tools: OpenApiTools, service: Service
) -> None:
    with pytest.raises(BadInputError, match="GET /x redirects more than 5 times"):
        await call(tools, service, moved("/x"))
    assert len(service.calls()) == 6


async def test_head_is_told_by_its_status(tools: OpenApiTools, service: Service) -> None:
    service.serve(document(head_x={}))
    service.answers["/x"] = [b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n"]
    assert await ask(tools, shop(service, remote="head_x")) == "200 OK (no type, 500 bytes)"
