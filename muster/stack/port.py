"""TCP ports: whether they are free, and who holds those that are not."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Mapping

import psutil

from contracts.error import BadInputError

HOST = "127.0.0.1"


def check_ports(wanted: Mapping[str, int]) -> None:
    """Raise BadInputError that names each port of `wanted` (setting: port) that cannot be bound."""
    problems: list[str] = []
    settings: list[str] = []
    for setting, port in wanted.items():
        error = _bind_error(port)
        if error is None:
            continue
        taken = error.errno == errno.EADDRINUSE
        reason = (
            f"is taken by {describe_holder(port)}" if taken else f"cannot be used: {error.strerror}"
        )
        problems.append(f"port {port} {reason}")
        settings.append(f"MUSTER_{setting.upper()}")
    if problems:
        raise BadInputError(
            "; ".join(problems), hint=f"stop that program, or choose another: {', '.join(settings)}"
        )


def describe_holder(port: int) -> str:
    """Return who listens on a port, as well as this user can know it."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status != psutil.CONN_LISTEN or not connection.laddr:
                continue
            _, listens_on = connection.laddr
            if listens_on == port and connection.pid:
                process = psutil.Process(connection.pid)
                return f"{process.name()} (pid {process.pid}, user {process.username()})"
    return "a program of another user"


def free_port() -> int:
    """Return a TCP port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _bind_error(port: int) -> OSError | None:
    with socket.socket() as probe:
        # As servers do: a port that only waits out its last connections counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            probe.listen(1)
        except OSError as error:
            return error
    return None
