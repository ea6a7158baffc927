"""Traces: off by default, one connected trace per workflow when on, nothing twice on replay."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

ROOT = Path(__file__).resolve().parents[2]


class Collector:
    """An OTLP/HTTP endpoint that keeps the spans it is sent."""

    def __init__(self) -> None:
        spans: list[Span] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                request = ExportTraceServiceRequest.FromString(body)
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        spans.extend(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
                """Say nothing."""

        self.spans = spans
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def collector() -> Iterator[Collector]:
    """Return a collector that listens."""
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever)
    thread.start()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()
    thread.join()


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
