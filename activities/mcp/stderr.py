"""The last words of a server program: what it wrote to its standard error."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

KEPT_BYTES = 16_384
"""What is kept of all that a server writes."""

SHOWN_CHARS = 1_000
"""How much of it an error shows. Less than is kept: a secret cut in two is cut away here."""


class LastWords:
    """A pipe for a program's standard error, read as it comes; an asynchronous context."""

    def __init__(self, scrub: Callable[[str], str]) -> None:
        self._scrub = scrub
        self._kept = b""
        self._read_end = -1
        self.file: TextIO

    async def __aenter__(self) -> Self:
        """Open the pipe."""
        self._read_end, write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self.file = os.fdopen(write_end, "w")
        asyncio.get_running_loop().add_reader(self._read_end, self._read)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close both ends; a server that lives on cannot block on a full pipe."""
        self.file.close()
        self._close()

    def text(self) -> str:
        """Return the end of what was written, scrubbed, or nothing."""
        if self._read_end >= 0:
            self._read()
        said = self._scrub(self._kept.decode(errors="replace")).strip()
        return said[-SHOWN_CHARS:]

    def _read(self) -> None:
        try:
            data = os.read(self._read_end, 65_536)
        except BlockingIOError:
            return
        if not data:
            self._close()
        self._kept = (self._kept + data)[-KEPT_BYTES:]

    def _close(self) -> None:
        if self._read_end >= 0:
            asyncio.get_running_loop().remove_reader(self._read_end)
            os.close(self._read_end)
            self._read_end = -1
