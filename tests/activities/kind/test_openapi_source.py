"""Documents of services: fetched, bounded, read once, kept while they cannot be had."""

from __future__ import annotations

import asyncio

import pytest

from activities.kind import openapi, openapi_source
from activities.kind.http import HttpClients
from activities.kind.openapi import OpenApiTools
from activities.kind.openapi_source import Sources
from activities.secret import Secrets
from contracts.error import BadInputError, LimitExceededError, UnavailableError
from tests.activities.kind.calling import ask, shop, tools
from tests.activities.kind.service import Service, document, flood, hang, http, service

__all__ = ["service", "tools"]


async def test_document_that_is_none_is_one_clear_error(
    tools: OpenApiTools, service: Service
) -> None:
    page = http("<html>Sign in</html>", content_type="text/html")
    service.answers["/openapi.json"] = [page]
    with pytest.raises(BadInputError, match="HTML or XML, not an OpenAPI document"):
        await tools.describe(shop(service))
    service.answers["/openapi.json"] = [http("no", "403 Forbidden")]
    with pytest.raises(BadInputError, match="answered 403 Forbidden"):
        await tools.describe(shop(service))
    service.answers["/openapi.json"] = [http("no", "503 Service Unavailable")]
    with pytest.raises(UnavailableError, match="answered 503"):
        await tools.describe(shop(service))


@pytest.mark.parametrize("is_told", [True, False])
async def test_document_of_50_mb_is_not_read_to_its_end(
    tools: OpenApiTools, service: Service, is_told: bool
) -> None:
    length = "Content-Length: 50000000\r\n" if is_told else "Connection: close\r\n"
    head = f"HTTP/1.1 200 OK\r\n{length}\r\n".encode()
    service.answers["/openapi.json"] = [flood(head, b" " * 100_000, 500)]
    with pytest.raises(LimitExceededError, match="the limit is 10,000,000 bytes"):
        await tools.describe(shop(service))
    await service.ended.wait()


async def test_document_is_read_when_a_job_opens_and_kept_for_its_calls(
    tools: OpenApiTools, service: Service
) -> None:
    service.serve(document(get_x={}), x=http("ok", content_type="text/plain"))
    await tools.describe(shop(service))
    ref = shop(service, remote="get_x")
    for _ in range(3):
        await ask(tools, ref)
    assert len(service.seen) == 4
    service.serve(document(get_x={}, get_y={}))
    assert len(await tools.describe(shop(service))) == 2, "it is read anew"


async def test_document_that_has_not_changed_is_parsed_once(service: Service) -> None:
    clients = HttpClients()
    sources = Sources(Secrets(), clients)
    ref = shop(service)
    assert ref.openapi is not None
    service.serve(document(get_x={}))
    first = await sources.get(ref, ref.openapi, anew=True)
    assert await sources.get(ref, ref.openapi, anew=True) is first
    service.serve(document(get_y={}))
    assert await sources.get(ref, ref.openapi, anew=True) is not first
    assert len(service.seen) == 3
    await sources.close()
    await clients.close()


async def test_calls_go_on_with_the_document_that_was_read_last(
    tools: OpenApiTools, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.serve(document(get_x={}), x=http("ok", content_type="text/plain"))
    ref = shop(service, remote="get_x")
    await tools.describe(ref)
    monkeypatch.setattr(openapi_source, "MAX_AGE_S", 0.0)
    service.answers["/openapi.json"] = [http("", "503 Service Unavailable")]
    assert await ask(tools, ref) == "ok"
    with pytest.raises(UnavailableError):
        await tools.describe(ref)


async def test_document_is_read_once_for_all_who_want_it_now(
    tools: OpenApiTools, service: Service
) -> None:
    service.serve(document(get_x={}))
    first, second, third = (asyncio.create_task(tools.describe(shop(service))) for _ in range(3))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == await third
    assert first.cancelled()
    assert len(service.seen) == 1


async def test_document_that_does_not_come_may_come_later(
    tools: OpenApiTools, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.answers["/openapi.json"] = [hang]
    monkeypatch.setattr(openapi, "LOAD_TIMEOUT_S", 0.2)
    with pytest.raises(UnavailableError, match=r"is not read within 0\.2 s"):
        await tools.load(shop(service, remote="get_x"))
    monkeypatch.setattr(openapi_source, "DOWNLOAD_TIMEOUT_S", 0.2)
    with pytest.raises(UnavailableError, match=r"has not come within 0\.2 s"):
        await tools.describe(shop(service, query={"other": "service"}))
