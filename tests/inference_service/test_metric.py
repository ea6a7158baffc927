"""The service's metrics: for Prometheus, by OTLP, and in the reference."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from inference_service.engine.protocol import EngineCapacity
from inference_service.engine.simulated import SimulatedConfig
from inference_service.http import http_app
from inference_service.metric import OBSERVED, RECORDED, ServiceMetrics
from muster import telemetry
from store.database import Database
from tests.inference_service.harness import Harness, harness, step_input
from tests.stack.collector import collecting

TIMED = SimulatedConfig(time_scale=1.0)
CAPACITY = EngineCapacity(32, 131_072, 32, 32_768, 2_048)
ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs/reference/metrics.md"
DASHBOARD = ROOT / "docker/grafana/muster.json"
ROW = re.compile(r"^\| `([a-z_.]+)` \| (\S+) \| (.{10,}?) \| (?:`(\w+)`)? ?\|$", re.MULTILINE)


async def scraped(h: Harness, registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Return what Prometheus reads at `/metrics`, by name and the value of its attribute."""
    app = http_app(h.service, model="small", capacity=CAPACITY, metrics=registry)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        answer = await client.get("/metrics")
    assert answer.status_code == 200
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "le"}
            if family.name.startswith(("muster_", "gen_ai_")):  # not the SDK's own
                assert labels.pop("gen_ai_request_model") == "small", sample
            found[sample.name, next(iter(labels.values()), "")] = sample.value
    return found


async def test_prometheus_reads_what_the_service_does(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    registry = CollectorRegistry()
    async with harness(database, config=TIMED) as h:
        ServiceMetrics(telemetry.meter("inference", registry), h.service, model="small")
        first = await h.run(step_input())
        await h.run(step_input(1, base=first.context))
        found = await scraped(h, registry)
        await asyncio.to_thread(telemetry.flush)
    assert found["muster_cohort_steps_total", ""] == 2
    assert found["muster_steps", "ready"] == found["muster_steps", "running"] == 0
    assert found["gen_ai_server_time_to_first_token_seconds_count", ""] == 2
    assert found["muster_step_time_seconds_count", "prefill"] == 2
    assert found["muster_step_time_seconds_sum", "decode"] > 0
    assert found["muster_prompt_tokens_total", "cached"] > 0
    assert found["muster_gpu_time_seconds_total", "useful_decode"] > 0
    assert found["muster_gpu_time_seconds_total", "waste"] == 0
    shown = set(re.findall(r"(?:muster|gen_ai_server)_[a-z_]+", DASHBOARD.read_text()))
    assert len(shown) > 15
    assert shown - {name for name, _ in found} == {"muster_tool_time_seconds_bucket"}


async def test_a_result_that_was_stored_before_is_measured_once(database: Database) -> None:
    registry = CollectorRegistry()
    async with harness(database, config=TIMED) as h:
        ServiceMetrics(telemetry.meter("inference", registry), h.service, model="small")
        await h.run(step_input())
        await h.run(step_input())
        found = await scraped(h, registry)
        await asyncio.to_thread(telemetry.flush)
    assert found["gen_ai_server_request_duration_seconds_count", ""] == 1


async def test_the_same_metrics_go_to_a_collector_if_asked_for(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        async with harness(database, config=TIMED) as h:
            meter = telemetry.meter("inference", CollectorRegistry())
            ServiceMetrics(meter, h.service, model="small")
            await h.run(step_input())
            await asyncio.to_thread(telemetry.flush)
    assert collector.metrics == {each.name for each in (*OBSERVED, *RECORDED)}


async def test_an_engine_that_is_gone_leaves_the_rest_of_the_page(database: Database) -> None:
    registry = CollectorRegistry()
    async with harness(database, config=TIMED) as h:
        ServiceMetrics(telemetry.meter("inference", registry), h.service, model="small")
        await h.run(step_input())
        h.engine.die()
        found = await scraped(h, registry)
        await asyncio.to_thread(telemetry.flush)
    assert found["gen_ai_server_request_duration_seconds_count", ""] == 1
    assert ("muster_steps", "ready") not in found


def test_every_metric_is_in_the_reference_with_its_unit_and_meaning() -> None:
    own, _, _ = REFERENCE.read_text().partition("## Tool workers")
    documented = ROW.findall(own)
    measured = [(m.name, m.unit, m.what, m.attribute) for m in (*OBSERVED, *RECORDED)]
    assert sorted(documented) == sorted(measured)
