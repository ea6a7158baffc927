"""OpenTelemetry traces, off unless the standard environment variables ask for them.

`OTEL_TRACES_EXPORTER` (`otlp`, `console`) or `OTEL_EXPORTER_OTLP_ENDPOINT` turns them on; the
exporter reads all its other `OTEL_…` variables itself. Spans go through the SDK's replay-safe
provider, so that a replayed workflow records nothing twice.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from importlib.metadata import entry_points

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from temporalio.client import Plugin
from temporalio.contrib.opentelemetry import OpenTelemetryPlugin, create_tracer_provider

from contracts.error import BadInputError

FLUSH_TIMEOUT_S = 3.0
"""An exit never waits longer than this for a collector that does not answer."""

_EXPORTERS_GROUP = "opentelemetry_traces_exporter"
_flushes: list[Callable[[], None]] = []


def enabled() -> bool:
    """Tell whether the environment asks for traces."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if exporter := os.environ.get("OTEL_TRACES_EXPORTER"):
        return exporter != "none"
    return bool(
        os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    )


def configure(service: str) -> None:
    """Send this process's spans to the exporter, under `service`; nothing if traces are off.

    Raises BadInputError if OTEL_TRACES_EXPORTER names an exporter that is not installed.
    """
    if not enabled() or _flushes:
        return
    provider = create_tracer_provider(
        resource=Resource.create(
            {"service.name": os.environ.get("OTEL_SERVICE_NAME") or f"muster-{service}"}
        ),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(_exporter()))
    trace.set_tracer_provider(provider)
    _flushes.append(provider.shutdown)


def plugins() -> list[Plugin]:
    """Return the Temporal client plugins that join workflows and activities into one trace."""
    return [OpenTelemetryPlugin(add_temporal_spans=True)] if enabled() else []


def flush() -> None:
    """Send what is left, for at most FLUSH_TIMEOUT_S; the last thing before a process leaves."""
    while _flushes:
        thread = threading.Thread(target=_flushes.pop(), daemon=True)
        thread.start()
        thread.join(FLUSH_TIMEOUT_S)


def _exporter() -> SpanExporter:
    name = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if name == "otlp":
        protocol = (
            os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
            or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
            or "http/protobuf"
        )
        name = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    for found in entry_points(group=_EXPORTERS_GROUP, name=name):
        exporter: SpanExporter = found.load()()
        return exporter
    known = sorted({found.name for found in entry_points(group=_EXPORTERS_GROUP)})
    raise BadInputError(
        f"OTEL_TRACES_EXPORTER is {name!r}, which is not installed",
        hint=f"one of {', '.join(known)}, or none",
    )
