"""An OTLP/HTTP endpoint that keeps the spans and the metrics' names it is sent."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """An OTLP/HTTP endpoint that keeps what it is sent."""

    def __init__(self) -> None:
        spans: list[Span] = []
        metrics: set[str] = set()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                if self.path.endswith("/metrics"):
                    for measured in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                        for scope in measured.scope_metrics:
                            metrics.update(metric.name for metric in scope.metrics)
                else:
                    for traced in ExportTraceServiceRequest.FromString(body).resource_spans:
                        for spanned in traced.scope_spans:
                            spans.extend(spanned.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
                """Say nothing."""

        self.spans = spans
        self.metrics = metrics
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def collecting() -> Iterator[Collector]:
    """Yield a collector that listens."""
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        collector.server.shutdown()
        collector.server.server_close()
        thread.join()
