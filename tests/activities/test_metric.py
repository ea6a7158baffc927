"""The tool worker's metrics: each attempt once, by how it ended."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from temporalio.exceptions import ApplicationError

from activities.metric import TOOL_TIME
from tests.activities.conftest import GOOD, Caller, HttpServer, request

REFERENCE = Path(__file__).resolve().parents[2] / "docs/reference/metrics.md"


@pytest.fixture(scope="module")
def reader() -> InMemoryMetricReader:
    """Return what reads this process's metrics: a process has one provider, for good."""
    found = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider([found], shutdown_on_exit=False))
    return found


def attempts(reader: InMemoryMetricReader) -> Counter[tuple[str, str]]:
    """Return how many attempts were measured, by tool and outcome."""
    data = reader.get_metrics_data()
    points: list[Any] = [
        point
        for resource in (data.resource_metrics if data else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == TOOL_TIME[0]
        for point in metric.data.data_points
    ]
    return Counter(
        {(point.attributes["tool"], point.attributes["outcome"]): point.count for point in points}
    )


async def test_each_attempt_is_measured_once_by_how_it_ended(
    reader: InMemoryMetricReader, call: Caller, http_server: HttpServer
) -> None:
    before = attempts(reader)
    http_server.answers = ["503 Service Unavailable\n\n", "200 OK\n\nfound"]
    get = request("get", {"url": http_server.url}, module=GOOD)
    with pytest.raises(ApplicationError):
        await call(get)
    await call(get)
    await call(get)  # answered from the ledger
    await call(request("pay", {"amont": 7}, module=GOOD, call_id="job-1/b/1/1"))
    assert attempts(reader) - before == {
        ("get", "transient"): 1,
        ("get", "ok"): 1,
        ("pay", "model"): 1,
    }


def test_it_is_in_the_reference_with_its_unit_and_meaning() -> None:
    name, unit, what = TOOL_TIME
    assert f"| `{name}` | {unit} | {what} |" in REFERENCE.read_text()
