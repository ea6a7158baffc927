"""Requests: each argument in its place, as the document's styles say, and never out of it."""

from __future__ import annotations

from typing import Any

import pytest

from activities.kind.http import HttpRequest
from activities.kind.openapi_request import Endpoint, build_request
from activities.tool import WrongArgumentsError
from tests.activities.kind.service import body, document, parameter
from tests.activities.kind.test_openapi_document import build

URL = "http://shop.example/v1"
FORM, JSON = "application/x-www-form-urlencoded", b'{"name":"Apfel \xc3\xbc","tags":["a","b"]}'
LIST = {"type": "array", "items": {"type": "string"}}


def make(
    operation: dict[str, Any],
    given: dict[str, Any],
    *,
    name: str = "get_x",
    endpoint: Endpoint | None = None,
    others: tuple[str, ...] = (),
) -> HttpRequest:
    built = build(document({name: operation}), name)
    endpoint = endpoint or Endpoint(URL, (), ())
    return build_request("x", built, endpoint, given, "job-1/b/1/0", others)


def headers(request: HttpRequest) -> dict[str, str]:
    return dict(request.headers)


@pytest.mark.parametrize(
    ("given", "value", "query"),
    [
        ({}, "a b&c=d/é", "x=a%20b%26c%3Dd%2F%C3%A9"),
        ({}, True, "x=true"),
        ({}, 1.5, "x=1.5"),
        ({}, None, ""),
        ({}, ["a", "b,c"], "x=a&x=b%2Cc"),
        ({}, [], ""),
        ({"explode": False}, ["a", "b,c"], "x=a,b%2Cc"),
        ({"explode": False}, [], ""),
        ({"style": "spaceDelimited"}, ["a", "b"], "x=a%20b"),
        ({"style": "pipeDelimited"}, ["a", "b"], "x=a%7Cb"),
        ({}, {"k": "v", "n": 2}, "k=v&n=2"),
        ({"explode": False}, {"k": "v", "n": 2}, "x=k,v,n,2"),
        ({"style": "deepObject"}, {"k": {"l": "v"}}, "x%5Bk%5D%5Bl%5D=v"),
        ({"style": "deepObject"}, {"k": [1, 2]}, "x%5Bk%5D=1&x%5Bk%5D=2"),
    ],
)
def test_query_parameters_are_written_by_their_style(given: Any, value: Any, query: str) -> None:
    request = make({"parameters": [parameter("x", **given)]}, {"x": value})
    assert request.url == f"{URL}/x" + (f"?{query}" if query else "")


def test_parameter_with_content_is_json() -> None:
    given: Any = {"name": "x", "in": "query", "content": {"application/json": {"schema": {}}}}
    request = make({"parameters": [given]}, {"x": {"k": [1]}})
    assert request.url == f"{URL}/x?x=%7B%22k%22%3A%5B1%5D%7D"


@pytest.mark.parametrize(
    ("given", "value", "path"),
    [
        ({}, "a b/c?d#e%2F", "a%20b%2Fc%3Fd%23e%252F"),
        ({}, ["a", "b,"], "a,b%2C"),
        ({}, {"k": "v"}, "k,v"),
        ({"explode": True}, {"k": "v"}, "k=v"),
        ({"style": "label"}, ["a", "b"], ".a,b"),
        ({"style": "label", "explode": True}, ["a", "b"], ".a.b"),
        ({"style": "matrix"}, ["a", "b"], ";id=a,b"),
        ({"style": "matrix", "explode": True}, ["a", "b"], ";id=a;id=b"),
        ({"style": "matrix", "explode": True}, {"k": "v"}, ";k=v"),
        ({}, "@evil.example", "%40evil.example"),
        ({}, "...", "..."),
    ],
)
def test_path_parameters_stay_in_their_segment(given: Any, value: Any, path: str) -> None:
    operation = {"path": "/fruit/{id}/price", "parameters": [parameter("id", "path", **given)]}
    assert make(operation, {"id": value}).url == f"{URL}/fruit/{path}/price"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("..", "not values of a path"),
        (".", "not values of a path"),
        ("../../admin", "not values of a path"),
        ("a/../../admin", "not values of a path"),
        ("..\\admin", "not values of a path"),
        ("..;/admin", "not values of a path"),
        ("", "must not be empty"),
        (None, "must not be empty"),
        ([], "must not be empty"),
        ("7/secret", "would be read as /fruit/{id}/{part}"),
        ("7//secret/", "would be read as /fruit/{id}/{part}"),
        ("\ud800", "UTF-8"),
        ("x" * 20_000, "the limit is 16,000"),
    ],
)
def test_path_parameter_cannot_lead_to_another_operation(value: Any, problem: str) -> None:
    operation = {"path": "/fruit/{id}", "parameters": [parameter("id", "path")]}
    others = ("/fruit/{id}", "/fruit/{id}/{part}")
    with pytest.raises(WrongArgumentsError, match=problem):
        make(operation, {"id": value}, others=others)
    assert make(operation, {"id": "group/7"}, others=("/other",)).url.endswith("/fruit/group%2F7")


def test_dots_around_a_parameter_count_too() -> None:
    operation = {"path": "/files/.{name}/x", "parameters": [parameter("name", "path")]}
    with pytest.raises(WrongArgumentsError, match="not values of a path"):
        make(operation, {"name": "."})


def test_headers_and_cookies() -> None:
    operation = {
        "parameters": [
            parameter("X-List", "header"),
            parameter("X-Text", "header"),
            parameter("session", "cookie"),
            parameter("other", "cookie"),
        ]
    }
    request = make(operation, {"X-List": ["a", "b"], "X-Text": " é ", "session": "1;2", "other": 3})
    assert headers(request)["X-List"] == "a,b"
    assert headers(request)["X-Text"] == "é"
    assert headers(request)["Cookie"] == "session=1%3B2; other=3"


@pytest.mark.parametrize(
    "value", ["a\r\nX-Admin: yes", "a\nb", "a\x00b", ["a", "b\r\n"], {"a\n": "b"}]
)
def test_header_with_a_line_break_is_refused(value: Any) -> None:
    with pytest.raises(WrongArgumentsError, match="no control characters"):
        make({"parameters": [parameter("X-Text", "header")]}, {"X-Text": value})
    with pytest.raises(WrongArgumentsError, match="the limit for a header is 8,000"):
        make({"parameters": [parameter("X-Text", "header")]}, {"X-Text": "x" * 9_000})


@pytest.mark.parametrize(
    ("media_type", "sent", "content"),
    [
        ("application/json", "application/json", JSON),
        ("application/vnd.shop+json; v=1", "application/vnd.shop+json", JSON),
        ("*/*", "application/json", JSON),
        (FORM, FORM, b"name=Apfel+%C3%BC&tags=a&tags=b"),
    ],
)
def test_body_is_sent_in_its_media_type(media_type: str, sent: str, content: bytes) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "tags": LIST}}
    operation = {"requestBody": body(schema, media_type)}
    request = make(operation, {"name": "Apfel ü", "tags": ["a", "b"]}, name="post_x")
    assert (request.content, headers(request)["Content-Type"]) == (content, sent)


def test_text_is_sent_as_text_and_an_optional_body_is_left_out() -> None:
    text = {"requestBody": body(None, "text/plain")}
    request = make(text, {"body": "Hello ü"}, name="post_x")
    assert request.content == "Hello ü".encode()
    schema = {"type": "object", "properties": {"x": {}}}
    assert make({"requestBody": body(schema)}, {}, name="post_x").content == b"{}"
    optional = make({"requestBody": body(schema, required=False)}, {}, name="post_x")
    assert optional.content is None
    assert "Content-Type" not in headers(optional)


@pytest.mark.parametrize(
    ("name", "has_key"),
    [
        ("get_x", False),
        ("head_x", False),
        ("post_x", True),
        ("put_x", True),
        ("patch_x", True),
        ("delete_x", True),
    ],
)
def test_key_goes_with_every_method_that_may_change_something(name: str, has_key: bool) -> None:
    request = make({}, {}, name=name)
    assert headers(request).get("Idempotency-Key") == ("job-1/b/1/0" if has_key else None)


def test_what_the_agent_file_gives_wins_over_the_model() -> None:
    endpoint = Endpoint(f"{URL}/?version=2", (("X-Key", "K"), ("accept", "a/b")), (("key", "K&"),))
    anything: Any = parameter("filter", schema={"type": "object"})
    operation = {"parameters": [anything]}
    request = make(operation, {"filter": {"key": "mine", "b": "c"}}, endpoint=endpoint)
    assert request.url == f"{URL}/x?version=2&b=c&key=K%26"
    assert request.headers == (("X-Key", "K"), ("accept", "a/b"))
    assert request.shown == "GET /x"
