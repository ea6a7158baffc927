"""Tools as users write them, for tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from typing import Annotated, Literal

import httpx
from pydantic import BaseModel, Field


class Unit(StrEnum):
    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"


@dataclass
class Place:
    city: str
    country: str = "PT"


class Forecast(BaseModel):
    place: Place
    day: date
    high: float


def forecast(
    place: Place,
    day: date,
    unit: Unit = Unit.CELSIUS,
    detail: Literal["short", "long"] = "short",
    schema: str | None = None,
) -> Forecast:
    """Say tomorrow's weather.

    Uses the climate of the place.

    Args:
        place: Where.
        day: Which day,
            as a date.
    """
    assert unit in Unit
    assert detail in ("short", "long")
    return Forecast(place=place, day=day, high=21.5)


async def shout(text: Annotated[str, Field(description="What to shout", max_length=10)]) -> str:
    """Return the text in capitals."""
    return text.upper()


def nothing() -> None:
    """Do nothing."""


def pay(amount: int, idempotency_key: str) -> dict[str, object]:
    """Pay once per key."""
    return {"amount": amount, "key": idempotency_key}


def get(url: str) -> str:
    """Fetch a page."""
    response = httpx.get(url, timeout=5.0)
    response.raise_for_status()
    return response.text


def charge(url: str, idempotency_key: str) -> str:
    """Charge once per key."""
    return httpx.get(url, headers={"key": idempotency_key}, timeout=30.0).text


def wrapped(text: str) -> object:
    """Return a coroutine from a plain function."""
    return shout(text)


class Greeter:
    """A callable object."""

    def __call__(self, name: str) -> str:
        """Greet."""
        return f"hello {name}"


greet = Greeter()


class Gate:
    """Lets a test see that a tool has started, and let it go on."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.go_on = threading.Event()
        self.cancelled = threading.Event()


GATES: dict[str, Gate] = {}


@contextmanager
def gate_named(name: str) -> Iterator[Gate]:
    """Set up a gate for tools that are given its name; it is open at last."""
    GATES[name] = Gate()
    yield GATES[name]
    GATES.pop(name).go_on.set()


def wait(gate: str) -> str:
    """Wait in a thread until the gate opens."""
    GATES[gate].started.set()
    assert GATES[gate].go_on.wait(30)
    return "waited"


async def wait_async(gate: str) -> str:
    """Wait in the loop for ever; note the cancellation."""
    GATES[gate].started.set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        GATES[gate].cancelled.set()
        raise
    return "never"


async def blocks(gate: str) -> str:
    """Block the loop until the gate opens."""
    GATES[gate].started.set()
    assert GATES[gate].go_on.wait(30)
    return "blocked"
