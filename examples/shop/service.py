"""A small HTTP service with an OpenAPI document: a shop that sells fruit to who has its key.

export SHOP_KEY=some-words                  # the tool worker needs the same
python -m examples.shop.service             # http://127.0.0.1:8378
curl -H "X-Api-Key: $SHOP_KEY" http://127.0.0.1:8378/fruits/pears
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sys
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

DOCUMENT = Path(__file__).parent / "openapi.yaml"
HOST = "127.0.0.1"
DEFAULT_PORT = 8378
PRICES = {"apples": 30, "pears": 45, "plums": 12}
"""Cents for one."""


class Shop:
    """What the shop has, and its orders by their keys."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._stock = {"apples": 12, "pears": 7, "plums": 40}
        self._orders: dict[str, dict[str, object]] = {}

    def app(self) -> Starlette:
        """Return the service."""
        return Starlette(
            routes=[
                Route("/openapi.yaml", self.document),
                Route("/fruits/{fruit}", self.get_fruit),
                Route("/orders", self.order_fruit, methods=["POST"]),
            ]
        )

    async def document(self, request: Request) -> Response:
        """Answer `GET /openapi.yaml`, which takes no key."""
        return PlainTextResponse(DOCUMENT.read_text(), media_type="application/yaml")

    async def get_fruit(self, request: Request) -> Response:
        """Answer `GET /fruits/NAME`."""
        if (refusal := self._refusal(request)) is not None:
            return refusal
        fruit = request.path_params["fruit"]
        if fruit not in PRICES:
            return JSONResponse({"error": f"we do not sell {fruit!r}"}, status_code=404)
        return JSONResponse(
            {"fruit": fruit, "in_stock": self._stock[fruit], "cents_each": PRICES[fruit]}
        )

    async def order_fruit(self, request: Request) -> Response:
        """Answer `POST /orders`; the same `Idempotency-Key` gets the same order again."""
        if (refusal := self._refusal(request)) is not None:
            return refusal
        key = request.headers.get("Idempotency-Key", "")
        if key in self._orders:
            return JSONResponse(self._orders[key], status_code=201)
        wanted = await request.json()
        fruit, count = wanted["fruit"], wanted["count"]
        if count > self._stock[fruit]:
            left = f"there are only {self._stock[fruit]} {fruit}"
            return JSONResponse({"error": left}, status_code=409)
        self._stock[fruit] -= count
        number = len(self._orders) + 1
        order = {"order": number, "count": count, "fruit": fruit, "cents": count * PRICES[fruit]}
        self._orders[key or str(number)] = order
        return JSONResponse(order, status_code=201)

    def _refusal(self, request: Request) -> Response | None:
        given = request.headers.get("X-Api-Key", "")
        if secrets.compare_digest(given.encode(), self._key.encode()):
            return None
        return JSONResponse({"error": "X-Api-Key is missing or wrong"}, status_code=401)


def main() -> int:
    """Serve until interrupted; exit status 1 without a key, or if the port is taken."""
    parser = argparse.ArgumentParser(description="Sell the example's fruit over HTTP.")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    port = parser.parse_args().port
    key = os.environ.get("SHOP_KEY", "")
    if not key:
        print("SHOP_KEY is not set: it is the key that callers must send", file=sys.stderr)
        print("hint: export SHOP_KEY=some-words, for the tool worker too", file=sys.stderr)
        return 1
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            print(f"port {port} cannot be used: {error.strerror}", file=sys.stderr)
            print("hint: another program holds it; choose one with --port", file=sys.stderr)
            return 1
    uvicorn.run(Shop(key).app(), host=HOST, port=port, log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
