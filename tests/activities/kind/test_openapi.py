"""Operations of a running service as tools: what is offered, what is sent, what comes back."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from activities.error_map import FailureKind, classify
from activities.kind import http as kind_http
from activities.kind.openapi import OpenApiTools
from activities.kind.openapi_endpoint import address_of
from activities.secret import Secrets
from activities.tool import WrongArgumentsError
from contracts.error import BadInputError, LimitExceededError
from tests.activities.kind.calling import ask, shop, tools
from tests.activities.kind.service import (
    Service,
    as_json,
    body,
    document,
    flood,
    http,
    parameter,
    running,
    service,
)

__all__ = ["service", "tools"]

ORDER = {
    "requestBody": body(
        {
            "type": "object",
            "properties": {"fruit": {"type": "string"}, "count": {"type": "integer"}},
            "required": ["fruit"],
        }
    )
}
FRUIT = {"path": "/fruit/{name}", "parameters": [parameter("name", "path")]}


async def test_operations_of_a_service_are_its_tools(tools: OpenApiTools, service: Service) -> None:
    service.serve(document(get_fruit=FRUIT, post_order=ORDER))
    served = await tools.describe(shop(service))
    assert [(each.remote, each.schema.name) for each in served] == [
        ("get_fruit", "get_fruit"),
        ("post_order", "post_order"),
    ]
    [one] = await tools.describe(shop(service, tools=["post_order"]))
    assert one.remote == "post_order"
    [alone] = await tools.describe(shop(service, remote="post_order", name="buy"))
    assert (alone.remote, alone.schema.name) == ("post_order", "buy")


async def test_call_is_one_request_with_its_key(tools: OpenApiTools, service: Service) -> None:
    service.serve(document(post_order=ORDER), order=as_json({"paid": True, "of": ["ü"]}))
    ref = shop(service, remote="post_order")
    assert await ask(tools, ref, fruit="pear", count=2) == '{"paid":true,"of":["ü"]}'
    [seen] = service.calls()
    assert (seen.method, seen.target, seen.json) == (
        "POST",
        "/order",
        {"fruit": "pear", "count": 2},
    )
    assert seen.headers["idempotency-key"] == "job-1/b/1/0"
    assert seen.headers["content-type"] == "application/json"


async def test_wrong_arguments_send_nothing(tools: OpenApiTools, service: Service) -> None:
    service.serve(document(post_order=ORDER))
    ref = shop(service, remote="post_order")
    for wrong in ({}, {"fruit": 7}, {"fruit": "pear", "count": "x" * 1_000_000}, {"price": 1}):
        with pytest.raises(WrongArgumentsError, match="post_order") as caught:
            await ask(tools, ref, **wrong)
        assert len(str(caught.value)) < 5_000
    assert service.calls() == []


async def test_arguments_of_a_megabyte_arrive_whole(tools: OpenApiTools, service: Service) -> None:
    service.serve(document(post_order=ORDER), order=http("thanks", content_type="text/plain"))
    text = "ü" * 500_000
    assert await ask(tools, shop(service, remote="post_order"), fruit=text) == "thanks"
    assert service.last.json == {"fruit": text}


async def test_document_may_be_a_file(
    tools: OpenApiTools, service: Service, tmp_path: Path
) -> None:
    file = tmp_path / "shop.json"
    file.write_text(json.dumps(document(get_x={})))
    service.answers["/v2/x"] = [http("here", content_type="text/plain")]
    ref = shop(service, document=str(file), url=f"{service.url}/v2/", remote="get_x")
    assert await ask(tools, ref) == "here"
    with pytest.raises(BadInputError, match="does not say at which host") as caught:
        await tools.describe(shop(service, document=str(file)))
    assert "`url`" in caught.value.hint
    with pytest.raises(BadInputError, match="there is no such file"):
        await tools.describe(shop(service, document=str(tmp_path / "gone.json")))
    with file.open("wb") as stream:
        stream.truncate(50_000_000)
    with pytest.raises(LimitExceededError, match="50,000,000 bytes, the limit is 10,000,000"):
        await tools.describe(shop(service, document=str(file)))


@pytest.mark.parametrize(
    ("server", "target"),
    [
        ({"url": "/v2"}, "/v2/x"),
        ({"url": "v2/"}, "/v2/x"),
        ({"url": "/{stage}", "variables": {"stage": {"default": "beta"}}}, "/beta/x"),
    ],
)
async def test_service_is_where_the_document_says(
    tools: OpenApiTools, service: Service, server: Any, target: str
) -> None:
    service.serve(document(get_x={}) | {"servers": [server]})
    service.answers[target] = [http("here", content_type="text/plain")]
    assert await ask(tools, shop(service, remote="get_x")) == "here"


async def test_operation_that_cannot_be_called_is_left_out_unless_it_is_named(
    tools: OpenApiTools, service: Service
) -> None:
    upload = {"requestBody": body({}, "multipart/form-data")}
    service.serve(document(post_upload=upload, get_x={}))
    assert [each.remote for each in await tools.describe(shop(service))] == ["get_x"]
    with pytest.raises(BadInputError, match="only JSON, forms and text are sent"):
        await tools.describe(shop(service, tools=["post_upload", "get_x"]))
    service.serve(document(post_upload=upload))
    with pytest.raises(BadInputError, match=r"no operation that can be called: .*multipart"):
        await tools.describe(shop(service))


async def test_operation_that_is_not_there_is_one_clear_error(
    tools: OpenApiTools, service: Service
) -> None:
    service.serve(document(get_fruit=FRUIT, post_order=ORDER))
    with pytest.raises(BadInputError, match="has no operation 'get_fruits'") as caught:
        await tools.describe(shop(service, tools=["get_fruits"]))
    assert "get_fruit" in caught.value.hint
    with pytest.raises(BadInputError, match="has no operation 'gone'"):
        await tools.load(shop(service, remote="gone"))


async def test_more_operations_than_an_agent_may_have_are_one_clear_error(
    tools: OpenApiTools, service: Service
) -> None:
    service.serve(document({f"get_x{number}": {} for number in range(65)}))
    with pytest.raises(LimitExceededError, match="65 operations, the limit is 64") as caught:
        await tools.describe(shop(service))
    assert "tools: [...]" in caught.value.hint
    assert len(await tools.describe(shop(service, tools=["get_x7"]))) == 1


async def test_connections_to_services_that_are_not_used_are_given_up(
    tools: OpenApiTools, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind_http, "MAX_CLIENTS", 1)
    async with running() as other, asyncio.timeout(10):
        for each in (service, other):
            each.serve(document(get_x={}), x=http("ok"))
            assert await ask(tools, shop(each, remote="get_x")) == "ok"
        await service.ended.wait()
        assert not other.ended.is_set()


def test_header_that_is_made_of_a_short_password_is_a_secret_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHOP_KEY", "k3y9")
    secrets = Secrets()
    address = address_of(secrets, "shop", "http://shop:${env:SHOP_KEY}@shop.example/v1")
    assert address.url == "http://shop.example/v1"
    assert address.headers == (("Authorization", "Basic c2hvcDprM3k5"),)
    assert secrets.scrub("sent Basic c2hvcDprM3k5") == "sent Basic [secret]"


async def test_connection_that_the_service_has_closed_costs_nothing(
    tools: OpenApiTools, service: Service
) -> None:
    service.serve(document(get_x={}))
    service.answers["/x"] = [flood(http("ok"), b"", 0)]  # and closes without saying so
    for _ in range(3):
        service.ended.clear()
        assert await ask(tools, shop(service, remote="get_x")) == "ok"
        await service.ended.wait()


async def test_cookies_of_one_call_are_not_sent_with_the_next(
    tools: OpenApiTools, service: Service
) -> None:
    service.serve(document(get_x={}), x=http("ok", set_cookie="session=1; Path=/"))
    for _ in range(2):
        await ask(tools, shop(service, remote="get_x"))
    assert [each.headers.get("cookie") for each in service.calls()] == [None, None]
    assert service.connections == 1, "the connection is kept"


async def test_secrets_go_to_the_service_and_nowhere_else(
    tools: OpenApiTools, service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHOP_KEY", "k/1 &2")
    (tmp_path / "token").write_text("t0k3n\n")
    needs = {"parameters": [parameter("X-Key", "header", required=True), parameter("q")]}
    service.serve(document(get_x=needs), x=http("ok", content_type="text/plain"))
    ref = shop(
        service,
        headers={"X-Key": "${env:SHOP_KEY}", "Authorization": f"Bearer ${{file:{tmp_path}/token}}"},
        query={"key": "${env:SHOP_KEY}"},
        remote="get_x",
    )
    [served] = await tools.describe(ref)
    assert served.schema.arguments["properties"] == {"q": {"type": "string"}}
    assert await ask(tools, ref, q="a") == "ok"
    assert service.last.target == "/x?q=a&key=k%2F1%20%262"
    assert service.last.headers["x-key"] == "k/1 &2"
    assert service.last.headers["authorization"] == "Bearer t0k3n"
    assert "authorization" not in service.seen[0].headers, "the document's host is not named"
    named = ref.model_copy(
        update={"openapi": ref.openapi.model_copy(update={"url": service.url})}  # type: ignore[union-attr]
    )
    await tools.describe(named)
    assert service.last.headers["authorization"] == "Bearer t0k3n", "it is the service itself"
    monkeypatch.delenv("SHOP_KEY")
    with pytest.raises(BadInputError, match=r"\$\{env:SHOP_KEY\} names a variable"):
        await tools.describe(ref)


async def test_secret_with_a_line_break_is_refused_without_being_told(
    tools: OpenApiTools, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_KEY", "first\r\nX-Admin: second")
    service.serve(document(get_x={}))
    with pytest.raises(BadInputError, match="value of header 'X-Key' has line breaks") as caught:
        await tools.describe(shop(service, headers={"X-Key": "${env:SHOP_KEY}"}))
    assert "first" not in str(caught.value)


async def test_document_of_one_host_does_not_send_secrets_to_another(
    tools: OpenApiTools, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_KEY", "secret")
    other = "http://localhost:1"
    service.serve(document(get_x={}) | {"servers": [{"url": other}]})
    keys = {"X-Key": "${env:SHOP_KEY}"}
    with pytest.raises(BadInputError, match=f"names {other} as its server") as caught:
        await tools.describe(shop(service, headers=keys))
    assert f"url: {other}" in caught.value.hint
    assert await tools.describe(shop(service, headers=keys, url=other))
    assert await tools.describe(shop(service, headers={"X-Plain": "1"}))


@pytest.mark.parametrize(
    ("url", "target", "authorization"),
    [
        ("http://${env:SHOP_HOST}/v1", "/v1/x", None),
        ("http://${env:SHOP_HOST}/bot${env:SHOP_KEY}/?v=2", "/botk%26/2/x?v=2", None),
        ("http://me:${env:SHOP_KEY}@${env:SHOP_HOST}", "/x", "Basic bWU6ayYvMg=="),
        ("${env:SHOP_URL}", "/v3/x", "Basic bWU6cA=="),
    ],
)
async def test_secrets_may_stand_in_the_address(
    tools: OpenApiTools,
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    target: str,
    authorization: str | None,
) -> None:
    host = service.url.removeprefix("http://")
    monkeypatch.setenv("SHOP_HOST", host)
    monkeypatch.setenv("SHOP_KEY", "k&/2")
    monkeypatch.setenv("SHOP_URL", f"http://me:p@{host}/v3")
    service.serve(document(get_x={}))
    service.answers[target.partition("?")[0]] = [http("ok", content_type="text/plain")]
    ref = shop(service, url=url, remote="get_x")
    assert await ask(tools, ref) == "ok"
    assert service.last.target == target
    assert service.last.headers.get("authorization") == authorization


@pytest.mark.parametrize(
    "url", ["shop.example", "ftp://x/y", "http://", "http://a b/", "file:///x"]
)
async def test_address_that_is_none_is_one_clear_error(
    tools: OpenApiTools, service: Service, url: str
) -> None:
    service.serve(document(get_x={}))
    with pytest.raises(BadInputError, match="not an HTTP URL with a host"):
        await tools.describe(shop(service, url=url))


async def test_errors_are_whose_fault_they_are(tools: OpenApiTools, service: Service) -> None:
    service.serve(document(get_x={}))
    ref = shop(service, remote="get_x")
    for status, kind in {
        "400 Bad Request": FailureKind.MODEL,
        "401 Unauthorized": FailureKind.PERMANENT,
        "403 Forbidden": FailureKind.PERMANENT,
        "404 Not Found": FailureKind.MODEL,
        "409 Conflict": FailureKind.MODEL,
        "422 Unprocessable Entity": FailureKind.MODEL,
        "429 Too Many Requests": FailureKind.TRANSIENT,
        "500 Internal Server Error": FailureKind.TRANSIENT,
        "503 Service Unavailable": FailureKind.TRANSIENT,
        "304 Not Modified": FailureKind.PERMANENT,
    }.items():
        service.answers["/x"] = [http("because of x", status)]
        with pytest.raises(Exception, match=f"GET /x answered {status}") as caught:
            await ask(tools, ref)
        failure = classify(caught.value)
        assert failure.kind is kind, status
        assert ("because of x" in failure.text) or status.startswith("304")
