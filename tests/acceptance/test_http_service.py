"""HTTP services as tools of whole jobs: attempts, delays, keys, secrets."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text as sql
from temporalio.client import Client, WorkflowFailureError

from contracts.agent import AgentSpec, RetryPolicy, ToolRef
from store.database import Database
from tests.acceptance.calling import Calling, asks, calling, says
from tests.activities.kind.calling import shop
from tests.activities.kind.service import (
    Answer,
    Service,
    as_json,
    body,
    document,
    flood,
    hang,
    http,
    service,
)

__all__ = ["service"]

DEADLINE_S = 30.0
DOWN = http("", "503 Service Unavailable")
NOT_FOUND = http("no such customer", "404 Not Found")
ORDER = {"requestBody": body({"type": "object", "properties": {"fruit": {"type": "string"}}})}
BUY = asks(("post_order", {"fruit": "pear"}))


def agent(ref: ToolRef) -> AgentSpec:
    return AgentSpec(name="buyer", instructions="Buy.", tools=(ref,), max_parallel_tool_calls=4)


def buying(service: Service, *answers: Answer, attempts: int = 4, **given: Any) -> ToolRef:
    """Return the tools of a service that takes orders."""
    service.serve(document(post_order=ORDER))
    service.answers["/order"] = answers
    retry = RetryPolicy(max_attempts=attempts, initial_interval=timedelta(milliseconds=50))
    return shop(service, retry=retry, **given)


class Buyer:
    """A scripted model that buys once; what it reads then is kept."""

    def __init__(self) -> None:
        self.read = ""

    def __call__(self, number: int, prompt: str) -> dict[str, Any]:
        """Call the tool, then answer."""
        self.read = prompt
        return BUY if number == 1 else says("Done.")


async def run(stage: Calling, ref: ToolRef) -> list[Any]:
    """Run a job and return the ledger's rows."""
    async with asyncio.timeout(DEADLINE_S):
        handle = await stage.start(agent(ref))
        assert (await handle.result()).answer == "Done."
        return await stage.ledger(handle.id)


async def test_service_that_is_busy_is_asked_again_and_not_before_it_says(
    temporal_client: Client, database: Database, service: Service
) -> None:
    """Case J4: 503 without headers, then 429 with `Retry-After` (2 s here): both are retried."""
    busy = http("", "429 Too Many Requests", retry_after="2")
    ref = buying(service, DOWN, busy, as_json({"paid": True}))
    buyer = Buyer()
    async with calling(temporal_client, database, buyer) as stage:
        rows = await run(stage, ref)
    calls = service.calls()
    assert len(calls) == 3
    assert calls[2].at - calls[1].at >= 2.0, "not before the delay that the service asked for"
    assert [row.outcome for row in rows] == ["failed", "failed", "finished"], "all are on record"
    assert {each.headers["idempotency-key"] for each in calls} == {rows[0].call_id}
    assert '{"paid":true}' in buyer.read


@pytest.mark.parametrize(
    ("answers", "attempts", "made", "told"),
    [
        pytest.param([DOWN], 3, 3, "gave up after 3 attempts", id="always down"),
        pytest.param([DOWN], 1, 1, "gave up after 1 attempts", id="one attempt"),
        pytest.param([DOWN, NOT_FOUND], 4, 2, "no such customer", id="the model's fault"),
        pytest.param([http("", "403 Forbidden")], 4, 1, "403 Forbidden", id="permanent"),
        pytest.param(
            [flood(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n", b"x" * 100_000, 9_999)],
            4,
            1,
            "the limit is 256,000 bytes",
            id="too much",
        ),
    ],
)
async def test_service_sees_exactly_the_attempts_that_the_policy_allows(
    temporal_client: Client,
    database: Database,
    service: Service,
    answers: list[Answer],
    attempts: int,
    made: int,
    told: str,
) -> None:
    ref, buyer = buying(service, *answers, attempts=attempts), Buyer()
    async with calling(temporal_client, database, buyer) as stage:
        rows = await run(stage, ref)
    assert (len(service.calls()), len(rows)) == (made, made)
    assert told in buyer.read


async def test_service_that_hangs_is_left_at_the_tools_timeout(
    temporal_client: Client, database: Database, service: Service
) -> None:
    ref = buying(service, hang, as_json({"paid": True}), timeout=timedelta(milliseconds=300))
    buyer = Buyer()
    async with calling(temporal_client, database, buyer) as stage:
        rows = await run(stage, ref)
    assert [row.outcome for row in rows] == ["failed", "finished"]
    assert '{"paid":true}' in buyer.read
    assert service.ended.is_set(), "the connection that hung was closed"


async def test_bad_document_ends_the_job_with_one_clear_error(
    temporal_client: Client, database: Database, service: Service
) -> None:
    loop = {"requestBody": body({"$ref": "#/components/schemas/A"})}
    service.serve(
        document(post_order=loop)
        | {"components": {"schemas": {"A": {"$ref": "#/components/schemas/A"}}}}
    )
    async with (
        calling(temporal_client, database, Buyer()) as stage,
        asyncio.timeout(DEADLINE_S),
    ):
        handle = await stage.start(agent(shop(service)))
        with pytest.raises(WorkflowFailureError) as caught:
            await handle.result()
    assert "leads back to itself" in str(caught.value.cause)
    assert len(service.seen) == 1, "the document was asked for once"


async def test_secret_that_a_service_repeats_goes_no_further(
    temporal_client: Client,
    database: Database,
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The answer, an error and the document itself hold the key; the job and the store do not."""
    canary = "canary/7f3a&9"
    parts = ("canary/7f3a", "canary%2F7f3a", "YW5hcnkvN2YzYSY5")
    monkeypatch.setenv("SHOP_KEY", canary)
    given: dict[str, Any] = {
        "url": service.url.replace("//", "//shop:${env:SHOP_KEY}@"),
        "headers": {"X-Key": "${env:SHOP_KEY}"},
        "query": {"key": "${env:SHOP_KEY}"},
    }
    echo = http(f"{canary} canary%2F7f3a%269 Basic c2hvcDpjYW5hcnkvN2YzYSY5", "500 Broken")
    ref = buying(service, echo, as_json({"key": canary}), **given)
    service.serve(document(post_order={**ORDER, "description": f"Use {canary}"}))
    buyer = Buyer()
    async with calling(temporal_client, database, buyer) as stage:
        async with asyncio.timeout(DEADLINE_S):
            handle = await stage.start(agent(ref))
            await handle.result()
        history = (await handle.fetch_history()).to_json()
    assert service.last.headers["x-key"] == canary
    assert service.last.headers["authorization"] == "Basic c2hvcDpjYW5hcnkvN2YzYSY5"
    assert "[secret]" in buyer.read
    async with database.engine.connect() as connection:
        tables = await connection.execute(
            sql("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        )
        stored = [
            str(list(await connection.execute(sql(f'SELECT t::text FROM "{name}" t'))))
            for (name,) in tables
        ]
    for shown in (buyer.read, history, caplog.text, *stored):
        assert not any(part in shown for part in parts)
