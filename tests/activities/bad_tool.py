"""Tools with every fault we know of, for tests."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, model_serializer

if TYPE_CHECKING:
    from decimal import Decimal

T = TypeVar("T")


class Opaque:
    pass


class NoSuchCustomerError(Exception):
    pass


class BusyError(Exception):
    retryable = True


class BrokenMessageError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


# What cannot be loaded


def no_hint(x, y: int = 0) -> str:  # type: ignore[no-untyped-def]
    return str(x)


def star(*names: str) -> str:
    return str(names)


def double_star(**names: str) -> str:
    return str(names)


def positional(x: int, /) -> str:
    return str(x)


def opaque(x: Opaque) -> str:
    return str(x)


def bad_default(x: Any = Opaque()) -> str:  # noqa: B008 - the fault is the point
    return str(x)


def nan_default(x: float = math.nan) -> str:
    return str(x)


class _RefusesSchema:
    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> Any:
        raise AssertionError("no schema")


def refuses_schema(x: _RefusesSchema) -> str:
    return str(x)


def function_argument(x: Callable[[], int]) -> str:
    return str(x)


def unresolved(x: Decimal) -> str:
    return str(x)


def key_of_wrong_type(idempotency_key: int) -> str:
    return str(idempotency_key)


def generator(n: int) -> Iterator[int]:
    yield from range(n)


not_callable = 7


# What raises


def no_such_customer(name: str) -> str:
    raise ValueError(f"no such customer {name!r}")


def own_refusal() -> str:
    raise NoSuchCustomerError("no such customer")


def bug() -> str:
    return "a" + 1  # type: ignore[operator, no-any-return]


def network() -> str:
    raise ConnectionResetError("connection reset by peer")


def busy() -> str:
    raise BusyError("come back")


def group() -> str:
    raise ExceptionGroup("two", [ValueError("bad"), TypeError("bug")])


async def task_group() -> str:
    async def fail() -> None:
        raise ValueError("no such customer")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fail())
    return ""


def system_exit() -> str:
    sys.exit("tool left")


async def system_exit_async() -> str:
    sys.exit("tool left")


async def keyboard_interrupt() -> str:
    raise KeyboardInterrupt


async def cancels_itself() -> str:
    raise asyncio.CancelledError("mine")


def cancelled_future() -> str:
    raise concurrent.futures.CancelledError


def stop_iteration() -> str:
    return next(iter(()))


def endless_recursion(n: int = 0) -> str:
    return endless_recursion(n + 1)


def broken_message() -> str:
    raise BrokenMessageError


def long_message() -> str:
    raise RuntimeError("x" * 10_000_000)


def surrogate_message() -> str:
    raise ValueError("\ud800 \x00")


# What returns something that is no text


def returns_nan() -> Any:
    return {"a": [1.0, math.nan]}


def returns_generator() -> Any:
    return (n for n in range(3))


def returns_endless() -> Any:
    def endless() -> Iterator[int]:
        while True:
            yield 1

    return {"items": endless()}


def returns_opaque() -> Any:
    return [Opaque()]


def returns_bytes() -> Any:
    return b"\xff\xfe"


def returns_surrogate() -> Any:
    return "\ud800"


def returns_itself() -> Any:
    items: list[Any] = []
    items.append(items)
    return items


def returns_deep() -> Any:
    items: list[Any] = []
    for _ in range(100_000):
        items = [items]
    return items


def returns_laughs() -> Any:
    items: list[Any] = ["ha"]
    for _ in range(40):
        items = [items, items]
    return items


def returns_large(n: int) -> Any:
    return "x" * n


def returns_many(n: int) -> Any:
    return list(range(n))


def prints(n: int) -> str:
    print("x" * n)  # noqa: T201 - the fault is the point
    return "printed"


async def ignores_cancellation() -> str:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


def quotes(n: int) -> str:
    return '"' * n


HANGS = threading.Event()
"""What hangs waits for this."""


class _HangsAsText(BaseModel):
    @model_serializer
    def _wait(self) -> str:
        HANGS.wait()
        return ""


def result_that_hangs() -> Any:
    return _HangsAsText()
