"""What a server sends, seen before the SDK takes it; its end is noticed when it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, Self

import anyio


class WatchedStream:
    """Hands on what another stream gives; calls `on_end` when there is no more."""

    def __init__(
        self, inner: Any, on_message: Callable[[Any], None], on_end: Callable[[], None]
    ) -> None:
        self._inner, self._on_message, self._on_end = inner, on_message, on_end

    @classmethod
    @asynccontextmanager
    async def over(
        cls,
        transport: AbstractAsyncContextManager[Any],
        on_message: Callable[[Any], None],
        on_end: Callable[[], None],
    ) -> AsyncIterator[tuple[Any, Any]]:
        """Open a transport of the SDK with its messages watched."""
        async with transport as (read, write):
            yield cls(read, on_message, on_end), write

    @property
    def last_context(self) -> Any:
        """The context of whoever sent the last message, where the stream knows it."""
        return getattr(self._inner, "last_context", None)

    async def receive(self) -> Any:
        """Return the next message."""
        try:
            message = await self._inner.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
            self._on_end()
            raise
        self._on_message(message)
        return message

    async def aclose(self) -> None:
        """Close the stream."""
        await self._inner.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        closed: bool | None = await self._inner.__aexit__(kind, error, trace)
        return closed
