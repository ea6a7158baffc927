"""Traces: off by default, one connected trace per workflow when on, nothing twice on replay."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack.collector import Collector, collecting

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def collector() -> Iterator[Collector]:
    """Return a collector that listens."""
    with collecting() as found:
        yield found


def run_program(address: str, **environment: str) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.stack.traced_program", address],
        env=clean | {"PYTHONPATH": str(ROOT)} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_one_connected_trace_and_nothing_twice(temporal_address: str, collector: Collector) -> None:
    run_program(temporal_address, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)
    assert Counter(span.name for span in collector.spans) == {
        "StartWorkflow:Traced": 1,
        "RunWorkflow:Traced": 1,
        "StartActivity:greet": 2,
        "RunActivity:greet": 2,
    }
    assert len({span.trace_id for span in collector.spans}) == 1
    by_id = {span.span_id: span.name for span in collector.spans}
    parents = {span.name: by_id.get(span.parent_span_id, "") for span in collector.spans}
    assert parents == {
        "StartWorkflow:Traced": "",
        "RunWorkflow:Traced": "StartWorkflow:Traced",
        "StartActivity:greet": "RunWorkflow:Traced",
        "RunActivity:greet": "StartActivity:greet",
    }


@pytest.mark.parametrize(
    "environment",
    [{}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_SDK_DISABLED": "true"}],
    ids=["nothing set", "none", "disabled"],
)
def test_traces_are_off_unless_asked_for(
    temporal_address: str, collector: Collector, environment: dict[str, str]
) -> None:
    if environment:
        environment = environment | {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    run_program(temporal_address, **environment)
    assert collector.spans == []


def test_collector_that_is_away_costs_neither_result_nor_status(temporal_address: str) -> None:
    run_program(temporal_address, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9")
