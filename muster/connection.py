"""The one way to a Temporal client: same data converter, telemetry and identity everywhere."""

from __future__ import annotations

import os
import socket
from functools import cache

from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.runtime import LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter

from contracts.error import UnavailableError
from muster import telemetry
from muster.settings import Settings
from muster.stack.state import locate


@cache
def _runtime() -> Runtime:
    """Return the SDK's runtime, quiet: a retried call is no news to a person."""
    errors_only = TelemetryFilter(core_level="ERROR", other_level="ERROR")
    return Runtime(telemetry=TelemetryConfig(logging=LoggingConfig(filter=errors_only)))


def identity(role: str) -> str:
    """Return the name under which this process shows in Temporal: role, pid, host."""
    return f"muster-{role}/{os.getpid()}@{socket.gethostname()}"


async def connect(settings: Settings, *, role: str = "client") -> Client:
    """Connect to the Temporal server that the settings name, or to the running embedded one.

    Raises UnavailableError if it does not answer.
    """
    return await connect_to(
        locate(settings).temporal_address, settings.temporal_namespace, role=role
    )


async def connect_to(address: str, namespace: str = "default", *, role: str = "client") -> Client:
    """Connect to the Temporal server at `address` (`host:port`), or raise UnavailableError."""
    try:
        return await Client.connect(
            address,
            namespace=namespace,
            data_converter=pydantic_data_converter,
            plugins=telemetry.plugins(),
            identity=identity(role),
            runtime=_runtime(),
        )
    except RuntimeError as error:
        raise UnavailableError(
            f"no Temporal server answers at {address}",
            hint="start the stack with `muster up`, or set MUSTER_TEMPORAL_ADDRESS",
        ) from error
