"""OpenTelemetry traces and metrics, sent nowhere unless the standard variables ask for it.

`OTEL_TRACES_EXPORTER`, `OTEL_METRICS_EXPORTER` (`otlp`, `console`) or `OTEL_EXPORTER_OTLP_ENDPOINT`
turn them on; the exporters read all their other `OTEL_…` variables themselves. Spans go through the
SDK's replay-safe provider, so that a replayed workflow records nothing twice. Metrics are there for
Prometheus, too, where a process serves HTTP.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from enum import StrEnum
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from opentelemetry import metrics, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from temporalio.client import Plugin
from temporalio.contrib.opentelemetry import OpenTelemetryPlugin, create_tracer_provider

from contracts.error import BadInputError

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader
    from prometheus_client import CollectorRegistry

FLUSH_TIMEOUT_S = 3.0
"""An exit never waits longer than this for a collector that does not answer."""

_flushes: list[Callable[[], None]] = []


class Signal(StrEnum):
    """What OpenTelemetry carries, as its variables spell it."""

    TRACES = "TRACES"
    METRICS = "METRICS"


def enabled(signal: Signal = Signal.TRACES) -> bool:
    """Tell whether the environment asks for a signal."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if exporter := os.environ.get(f"OTEL_{signal}_EXPORTER"):
        return exporter != "none"
    return bool(
        os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        or os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    )


def configure(service: str) -> None:
    """Send this process's spans to the exporter, under `service`; nothing if traces are off.

    Raises BadInputError if OTEL_TRACES_EXPORTER names an exporter that is not installed.
    """
    if not enabled() or _flushes:
        return
    provider = create_tracer_provider(resource=_resource(service), shutdown_on_exit=False)
    exporter: SpanExporter = _exporter(Signal.TRACES)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    _flushes.append(provider.shutdown)


def export_metrics(service: str) -> None:
    """Send what this process measures to the exporter; nothing if metrics are off.

    Raises BadInputError if OTEL_METRICS_EXPORTER names an exporter that is not installed.
    """
    if enabled(Signal.METRICS):
        metrics.set_meter_provider(_meter_provider(service, []))


def meter(service: str, registry: CollectorRegistry) -> Meter:
    """Return the meter of a process that serves HTTP: `registry` has its metrics for Prometheus.

    They go to the exporter, too, if the environment asks for it. Raises BadInputError if
    OTEL_METRICS_EXPORTER names an exporter that is not installed.
    """
    # Here, since commands that measure nothing should not wait for it.
    from opentelemetry.exporter.prometheus import PrometheusMetricReader

    reader = PrometheusMetricReader(registry=registry, scope_info_enabled=False)
    return _meter_provider(service, [reader]).get_meter(f"muster.{service}")


def _meter_provider(service: str, readers: list[MetricReader]) -> MeterProvider:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    if enabled(Signal.METRICS):
        readers = [*readers, PeriodicExportingMetricReader(_exporter(Signal.METRICS))]
    provider = MeterProvider(readers, resource=_resource(service), shutdown_on_exit=False)
    _flushes.append(provider.shutdown)
    return provider


def plugins() -> list[Plugin]:
    """Return the Temporal client plugins that join workflows and activities into one trace."""
    return [OpenTelemetryPlugin(add_temporal_spans=True)] if enabled() else []


def flush() -> None:
    """Send what is left, for at most FLUSH_TIMEOUT_S; the last thing before a process leaves."""
    while _flushes:
        thread = threading.Thread(target=_flushes.pop(), daemon=True)
        thread.start()
        thread.join(FLUSH_TIMEOUT_S)


def _resource(service: str) -> Resource:
    name = os.environ.get("OTEL_SERVICE_NAME") or f"muster-{service}"
    return Resource.create({"service.name": name})


def _exporter(signal: Signal) -> Any:
    """Return the exporter of a signal that the environment names, by its entry point."""
    variable = f"OTEL_{signal}_EXPORTER"
    name = os.environ.get(variable) or "otlp"
    if name == "otlp":
        protocol = (
            os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL")
            or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
            or "http/protobuf"
        )
        name = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    group = f"opentelemetry_{signal.lower()}_exporter"
    for found in entry_points(group=group, name=name):
        return found.load()()
    known = sorted({found.name for found in entry_points(group=group)})
    raise BadInputError(
        f"{variable} is {name!r}, which is not installed",
        hint=f"one of {', '.join(known)}, or none",
    )
