"""A server program: started, spoken with over its standard streams, and ended with all it started.

What it prints is bounded: a line that grows past `MAX_MESSAGE_BYTES` ends it, and of its standard
error the last words are kept. That, and a group of processes that never outlives its session, are
why this is not the SDK's own transport, which keeps a line of any length and lets live on what a
server that ended by itself has started.

A worker that is killed closes the program's standard input, at whose end servers end.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from activities.mcp.endpoint import Endpoint
from activities.mcp.http import MAX_MESSAGE_BYTES
from contracts.error import BadInputError

CHUNK_BYTES = 65_536

KEPT_BYTES = 16_384
"""What is kept of all that a program writes to its standard error."""

SHOWN_CHARS = 1_000
"""How much of it an error shows. Less than is kept: a secret cut in two is cut away here."""

END_GRACE_S = 1.5
"""How long a program may take to end by itself, and once more when it is told to. Both together are
less than what a tool worker is given to close."""

STATUS_WAIT_S = 1.0
"""How long the status of a program that has closed its output is waited for."""

POLL_S = 0.02


class Program:
    """A running server program, and the last that was heard of it."""

    def __init__(self, endpoint: Endpoint, scrub: Callable[[str], str]) -> None:
        self._endpoint, self._scrub = endpoint, scrub
        self._said = b""
        self._process: asyncio.subprocess.Process | None = None

    @property
    def status(self) -> str:
        """How it ended, as words that follow "ended"; nothing if that is not known."""
        process = self._process
        known = process is not None and process.returncode is not None
        return f" with status {process.returncode}" if process and known else ""

    @property
    def last_words(self) -> str:
        """The end of what it wrote to its standard error, scrubbed, as the end of a sentence."""
        text = self._scrub(self._said.decode(errors="replace")).strip()[-SHOWN_CHARS:]
        return f"; its last words: {text}" if text else ""

    @asynccontextmanager
    async def speaking(self, fail: Callable[[Exception], None]) -> AsyncIterator[tuple[Any, Any]]:
        """Start it and give out the streams of its messages; `fail` is told why it cannot go on.

        Raises OSError if it cannot be started.
        """
        self._process = process = await asyncio.create_subprocess_exec(
            *self._endpoint.command,
            env=get_default_environment() | dict(self._endpoint.env),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        heard_in, heard = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        said, said_out = anyio.create_memory_object_stream[SessionMessage](0)
        tasks = [
            asyncio.create_task(self._read(process, heard_in, fail)),
            asyncio.create_task(self._write(process, said_out, heard_in)),
            asyncio.create_task(self._listen(process)),
        ]
        try:
            yield heard, said
        finally:
            with anyio.CancelScope(shield=True):
                for stream in (heard, said):
                    await stream.aclose()
                await asyncio.wait({tasks[1]}, timeout=END_GRACE_S)  # what is said already goes out
                await _end(process)
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                for end in (heard_in, said_out):
                    await end.aclose()

    async def _read(
        self, process: asyncio.subprocess.Process, heard: Any, fail: Callable[[Exception], None]
    ) -> None:
        """Hand on each line as a message; when there is nobody left to read, only drain."""
        assert process.stdout is not None
        line = bytearray()
        is_wanted = True
        while chunk := await process.stdout.read(CHUNK_BYTES):
            first, *others = chunk.split(b"\n") if is_wanted else [b""]
            line += first
            for each in others:
                is_wanted = is_wanted and await _deliver(bytes(line), heard)
                line = bytearray(each)
            if len(line) > MAX_MESSAGE_BYTES:
                limit = f"{MAX_MESSAGE_BYTES:,} bytes"
                shown = self._endpoint.shown
                fail(BadInputError(f"MCP server {shown!r} prints a line of more than {limit}"))
                is_wanted = False
                line.clear()
                await heard.aclose()
        with suppress(TimeoutError):  # so that its status is known before its end is
            async with asyncio.timeout(STATUS_WAIT_S):
                await process.wait()
        await heard.aclose()

    async def _write(self, process: asyncio.subprocess.Process, said: Any, heard: Any) -> None:
        """Send each message as a line; a program that reads no more has ended, as we see it."""
        assert process.stdin is not None
        try:
            async for each in said:
                text = each.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(text.encode() + b"\n")
                await process.stdin.drain()
        except (OSError, RuntimeError):
            await said.aclose()
            await heard.aclose()

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while chunk := await process.stderr.read(CHUNK_BYTES):
            self._said = (self._said + chunk)[-KEPT_BYTES:]


async def _deliver(line: bytes, heard: Any) -> bool:
    """Hand on one line, as a message or as what is wrong with it; say whether anybody reads."""
    if not line.strip():
        return True
    item: SessionMessage | Exception
    try:
        item = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        item = error
    try:
        await heard.send(item)
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        return False
    return True


async def _end(process: asyncio.subprocess.Process) -> None:
    """Let a program end by itself; then end what is left of its group, at last by force."""
    assert process.stdin is not None
    process.stdin.close()
    for number in (0, signal.SIGTERM, signal.SIGKILL):
        if not _signal(process.pid, number):
            break
        until = asyncio.get_running_loop().time() + END_GRACE_S
        # Not `process.wait()`: it waits for the end of pipes that others may hold.
        while _is_waited_for(process, number) and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110 - no event tells of a group's end
            await asyncio.sleep(POLL_S)
    transport = getattr(process, "_transport", None)
    if transport is not None:  # whoever left the group may hold a pipe open
        transport.close()


def _is_waited_for(process: asyncio.subprocess.Process, number: int) -> bool:
    """Say whether the program runs, and once it was told to end whether any of its group does."""
    return process.returncode is None or (number != 0 and _signal(process.pid, 0))


def _signal(group: int, number: int) -> bool:
    """Signal a group of processes; say whether there was any."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
