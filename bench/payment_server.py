"""A payment server that charges once for each idempotency key, and counts what it was asked.

`python -m bench.payment_server` serves on a free port of the loopback interface until its standard
input ends, and prints the port on one line. `POST /charge` with an `Idempotency-Key` and a JSON
body {"amount": n, "hold_s": s} charges, and answers `s` seconds later: who is killed in between has
had an effect and does not know it. A key that comes again is answered with its first charge.
`GET /ledger` says how often each key was charged and asked for, and how many answers are held.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from contracts.error import UnavailableError
from muster.stack.port import free_port


class Payments:
    """What was charged; in memory, since it outlives whoever is killed."""

    def __init__(self) -> None:
        self.charged: dict[str, int] = {}
        self.asked: Counter[str] = Counter()
        self.charges = 0
        self.held = 0

    async def charge(self, request: Request) -> JSONResponse:
        """Charge, hold the answer back, answer."""
        key = request.headers.get("Idempotency-Key")
        if key is None:
            return JSONResponse({"error": "no Idempotency-Key"}, status_code=400)
        given = await request.json()
        self.asked[key] += 1
        if key not in self.charged:
            self.charged[key] = given["amount"]
            self.charges += 1
        self.held += 1
        try:
            await asyncio.sleep(given["hold_s"])
        finally:
            self.held -= 1
        return JSONResponse({"charged": self.charged[key], "key": key})

    async def ledger(self, _: Request) -> JSONResponse:
        """Return all counts."""
        return JSONResponse(
            {
                "charged": self.charged,
                "asked": dict(self.asked),
                "charges": self.charges,
                "held": self.held,
            }
        )


@contextmanager
def payment_server() -> Iterator[str]:
    """Run the server in a process of its own; yield its URL."""
    command = [sys.executable, "-m", "bench.payment_server"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            if not (line := process.stdout.readline().strip()):
                raise UnavailableError("the payment server did not come up")
            yield f"http://127.0.0.1:{line}"
        finally:
            process.kill()


async def serve() -> None:
    """Serve until standard input ends."""
    payments = Payments()
    app = Starlette(
        routes=[
            Route("/charge", payments.charge, methods=["POST"]),
            Route("/ledger", payments.ledger),
        ]
    )
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn has no event
        await asyncio.sleep(0.01)
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    server.should_exit = True
    await serving


if __name__ == "__main__":
    asyncio.run(serve())
