"""TCP ports: whether they are free, and who holds those that are not."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from collections.abc import Mapping

import psutil

from contracts.error import BadInputError, UnavailableError

HOST = "127.0.0.1"

UNASSIGNED = (20_000, 32_000)
"""First port and end of a range below those that systems give to outgoing connections."""


def check_ports(wanted: Mapping[str, int]) -> None:
    """Raise BadInputError that names each port of `wanted` (setting: port) that cannot be bound."""
    problems: list[str] = []
    settings: list[str] = []
    for setting, port in wanted.items():
        error = _bind_error(port)
        if error is None:
            continue
        problems.append(_reason(port, error))
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
    """Return a TCP port that is free now, and that no outgoing connection takes by chance."""
    ports = range(*UNASSIGNED)
    for port in random.SystemRandom().sample(ports, len(ports)):
        if _bind_error(port) is None:
            return port
    raise UnavailableError(f"no TCP port from {ports[0]} to {ports[-1]} is free")


def bound_socket(host: str, port: int, setting: str) -> socket.socket:
    """Return a TCP socket bound to a port, not yet listening; the caller closes it.

    Raises BadInputError that names who holds the port, and `setting`, if it cannot be bound.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise BadInputError(_reason(port, error), hint=f"choose another: {setting}") from error
    return bound


def _reason(port: int, error: OSError) -> str:
    taken = error.errno == errno.EADDRINUSE
    why = f"is taken by {describe_holder(port)}" if taken else f"cannot be used: {error.strerror}"
    return f"port {port} {why}"


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
