"""Jobs whose tools give secrets away, and everything that is left of those jobs afterwards."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import asyncpg
import pytest
from pydantic import JsonValue
from sqlalchemy import text as sql
from temporalio.client import Client, WorkflowFailureError

from activities.kind.query import MAX_CELL_CHARS
from contracts.agent import AgentSpec, OnFailure, RetryPolicy, Sampling, ToolRef
from contracts.tool_source import McpServer, OpenApiService, SqlDatabase
from muster.archive import export_run
from muster.archiver import refold
from store.database import Database
from tests.acceptance.calling import Calling, Handle, Reply, asks, calling, says
from tests.acceptance.test_large import LONG
from tests.activities.kind.mcp_client import web_server
from tests.activities.kind.service import as_json, document, http, running
from tests.cli.stage import CommandLine
from tests.stack.collector import collecting
from tests.workflows.stage import current_details

ROOT = Path(__file__).parents[2]
TOOLS = Path(__file__).parent / "tool"
DEADLINE_S = 60.0

TOKEN = 'canary-env/7f3a "9" &+'
KEY = "canary-key-51b2-0000\ncanary-tail-77aa-1111"
FOLDER = "canary-path-66d0"

_HEADS = (b"canary-env", b"canary-key", b"canary-tail", b"canary-path")


VIEWS = (("--json",), (), ("--transcript", "--full"))
"""Options of `muster show`."""


def _needles() -> Iterator[bytes]:
    for head in _HEADS:
        yield head
        yield head.hex().encode()
        for before in range(3):
            cut = 4 if before else 0  # what also holds bits of the text before it
            whole = (before + len(head)) // 3 * 4
            yield base64.b64encode(bytes(before) + head)[cut:whole]


NEEDLES = tuple(_needles())


def found_in(left: bytes) -> list[bytes]:
    """Return what of the secrets, in any form, stands in something."""
    return [needle for needle in NEEDLES if needle in left]


@dataclass(frozen=True)
class Echo:
    """A call that is answered with a secret; `told` is a part of what the model reads instead."""

    tool: ToolRef
    told: str = "[secret]"
    arguments: dict[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where tools find what they need; the worker has TOKEN and FOLDER in its environment."""

    directory: Path
    shop_url: str
    stack: AsyncExitStack

    @property
    def key(self) -> str:
        """The reference to KEY."""
        return f"${{file:{self.directory / 'key'}}}"


Kind = Callable[[Place], Awaitable[Sequence[Echo]]]
"""Tools of one kind. What they need that runs is entered in the place's `stack`."""

ONCE = RetryPolicy(max_attempts=1)
TWICE = RetryPolicy(max_attempts=2, initial_interval=timedelta(milliseconds=50))


async def functions(_: Place) -> list[Echo]:
    """Python functions that know the secret of another tool."""
    told = {
        "prints": "printed",
        "forgets": "forgotten",
        "breaks": FATAL[0],
    }
    names = ("says", "tells", "encodes", "repeats", "prints", "forgets", "refuses", "breaks")
    return [
        *(
            Echo(ToolRef(function=f"echo:{name}", retry=TWICE), told.get(name, "[secret]"))
            for name in names
        ),
        Echo(ToolRef(function="echo:drops", retry=TWICE), FATAL[1]),
        Echo(ToolRef(function="echo:garbles", retry=ONCE), "cannot become text"),
    ]


def _database(name: str, url: str, statement: str) -> ToolRef:
    database = SqlDatabase(url=url, description="Notes.", statement=statement)
    return ToolRef(sql=database, name=name, retry=TWICE)


async def databases(place: Place) -> list[Echo]:
    """Databases whose URLs hold references, and whose rows and errors hold the secrets."""
    notes = place.directory / FOLDER / "notes.db"
    notes.parent.mkdir()
    with closing(sqlite3.connect(notes)) as connection, connection:
        connection.execute("create table note (text)")
        connection.executemany("insert into note values (?)", [(TOKEN,), (KEY,), (FOLDER,)])
    shop = await asyncpg.connect(place.shop_url)
    await shop.execute("create table note (text text)")
    await shop.executemany("insert into note values ($1)", [(TOKEN,), (KEY,), (FOLDER,)])
    await shop.close()
    folder = f"sqlite:///{place.directory}/${{env:SHOP_FOLDER}}"
    user, _, rest = place.shop_url.removeprefix("postgresql://").partition("@")
    server = f"postgresql://{user.partition(':')[0]}:{place.key}@{rest}"
    named = f"{server}{'&' if '?' in rest else '?'}shop.token=${{env:SHOP_TOKEN}}"
    away = f"postgresql://shop:{place.key}@/shop?host=${{env:SHOP_FOLDER}}.invalid"
    query = "select text from note"
    cut = f"select repeat('x', {MAX_CELL_CHARS - 14}) || text from note limit 1"
    return [
        Echo(_database("notes", f"{folder}/notes.db", query)),
        Echo(_database("no_notes", f"{folder}/none.db", query), "/[secret]/none.db"),
        Echo(_database("rows", server, query)),
        Echo(_database("cut", server, cut)),
        Echo(_database("many", server, "select repeat(text, 300) from note")),
        Echo(_database("casts", server, "select text::int from note"), "type integer"),
        Echo(_database("settings", named, "select current_setting('shop.token')")),
        Echo(_database("away", away, query), "at [secret].invalid"),
    ]


FATAL = ("RuntimeError: [secret] is no number", "gave up after 2 attempts")
"""Of the calls that are told so, each fails a job whose agent wants that."""


async def mcp_servers(place: Place) -> list[Echo]:
    """MCP servers: a program that has the secrets, and a service whose every answer is one."""
    program = McpServer(
        command=(sys.executable, str(TOOLS / "echo_server.py"), place.key),
        env={"TOKEN": "${env:SHOP_TOKEN}", "PYTHONPATH": str(ROOT)},
        list_timeout=timedelta(seconds=30),
    )
    web = await place.stack.enter_async_context(web_server())
    web.on_call = lambda message: (f"404 Not Found\nX-Key: {FOLDER}", f"no {TOKEN} here")
    headers = {"Authorization": "Bearer ${env:SHOP_TOKEN}", "X-Folder": "${env:SHOP_FOLDER}"}
    service = McpServer(url=web.url, headers=headers)
    return [
        Echo(ToolRef(mcp=program, remote="mcp_says", retry=ONCE)),
        Echo(ToolRef(mcp=program, remote="mcp_refuses", retry=ONCE)),
        Echo(ToolRef(mcp=program, remote="mcp_dies", retry=ONCE), "no licence for [secret]"),
        Echo(ToolRef(mcp=service, remote="do", retry=ONCE), "no [secret] here"),
    ]


async def http_services(place: Place) -> list[Echo]:
    """Operations of a service that has the secrets in path, query and headers."""
    web = await place.stack.enter_async_context(running())
    basic = base64.b64encode(f"shop:{TOKEN}".encode()).decode()
    away = f"https://{FOLDER}.example/?key={quote(TOKEN)}"
    answers = {
        "http_says": http(f"{TOKEN} Basic {basic} {KEY}", content_type="text/plain"),
        "http_refuses": http(f"no customer {TOKEN}", "404 Not Found", x_key=FOLDER),
        "http_breaks": http(f"cannot reach {TOKEN}", "500 Internal Server Error"),
        "http_moves": http("", "302 Found", location=away),
    }
    operations: dict[str, Any] = {
        f"get_{name}": {"path": f"/{name}", "operationId": name, "description": f"Knows {TOKEN}."}
        for name in answers
    }
    web.answers["/openapi.json"] = [as_json(document(**operations))]
    web.answers |= {f"/{FOLDER}/{name}": [answer] for name, answer in answers.items()}
    host = web.url.removeprefix("http://")
    service = OpenApiService(
        document=f"{web.url}/openapi.json",
        url=f"http://shop:${{env:SHOP_TOKEN}}@{host}/${{env:SHOP_FOLDER}}",
        headers={"X-Key": "${env:SHOP_TOKEN}"},
        query={"key": "${env:SHOP_TOKEN}"},
    )
    told = {"http_breaks": "gave up after 2 attempts", "http_moves": "another service"}
    return [
        Echo(ToolRef(openapi=service, remote=name, retry=TWICE), told.get(name, "[secret]"))
        for name in answers
    ]


KINDS: Sequence[Kind] = (functions, databases, mcp_servers, http_services)
"""A kind of tool that reads secrets, or can echo them, has its place here."""


@dataclass(frozen=True)
class Left:
    """What is left of the jobs, by the place where it is; and what the model read of each call."""

    echoes: Sequence[Echo]
    read: dict[str, str]
    places: dict[str, bytes]


@contextmanager
def tool_worker(log: Path, address: str, database_url: str, **more: str) -> Iterator[None]:
    """Run `muster worker tools` in a process of its own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MUSTER_", "OTEL_"))}
    environment = kept | {
        "MUSTER_TEMPORAL_ADDRESS": address,
        "MUSTER_DATABASE_URL": database_url,
        "MUSTER_DATA_DIR": str(log.parent / "data"),
        "MUSTER_TOOL_PATH": str(TOOLS),
        "MUSTER_LOG_LEVEL": "DEBUG",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "SHOP_TOKEN": TOKEN,
        "SHOP_FOLDER": FOLDER,
        **more,
    }
    with log.open("wb") as out:
        worker = subprocess.Popen(
            [sys.executable, "-m", "muster", "worker", "tools"],
            env=environment,
            stdout=out,
            stderr=out,
        )
        try:
            yield
        finally:
            worker.send_signal(signal.SIGTERM)
            worker.wait(DEADLINE_S)


async def leave(client: Client, database_url: str, shop_url: str, directory: Path) -> Left:
    """Run a job that calls every tool, and one that fails with a tool; gather all they left."""
    address = client.service_client.config.target_host
    (directory / "key").write_text(KEY)
    database = Database(database_url)
    async with AsyncExitStack() as stack, asyncio.timeout(DEADLINE_S):
        stack.push_async_callback(database.close)
        place = Place(directory, shop_url, stack)
        echoes = [echo for kind in KINDS for echo in await kind(place)]
        prompts, turn = list[str](), list[Echo]()

        def model(number: int, prompt: str) -> Reply:
            prompts.append(prompt)
            calls = [(echo.tool.tool_name, echo.arguments) for echo in turn]
            return asks(*calls) if number == 1 else says(prompt[-2_000:])

        stage = await stack.enter_async_context(
            calling(client, database, model, tools=False, config=LONG)
        )
        collector, log = stack.enter_context(collecting()), directory / "tools.log"
        traced = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        with tool_worker(log, address, database_url, **traced):
            turn[:] = echoes
            asked = await _started(stage, turn)
            await asked.result()
            turn[:] = [_fatal(echo) for echo in echoes if echo.told in FATAL]
            failed = await _started(stage, turn)
            with pytest.raises(WorkflowFailureError):
                await failed.result()
        rows = await stage.ledger(asked.id)
        places = {
            "prompts": "\n".join(prompts).encode(),
            "log": log.read_bytes(),
            "spans": b"\n".join(span.SerializeToString() for span in collector.spans),
            "tables": await _tables(database, asked, failed),
            **await _of_temporal("job", asked),
            **await _of_temporal("failed job", failed),
        }
        shell = CommandLine(
            directory,
            {
                "MUSTER_TEMPORAL_ADDRESS": address,
                "MUSTER_DATABASE_URL": database_url,
                "MUSTER_DATA_DIR": str(directory / "data"),
            },
        )
        places |= await _shown("job", shell, asked, *VIEWS)
        places |= await _shown("failed job", shell, failed, *VIEWS[:1])
    return Left(echoes, {row.tool: _told(row.result) for row in rows if row.result}, places)


def _fatal(echo: Echo) -> Echo:
    tool = echo.tool.model_copy(update={"on_failure": OnFailure.FAIL_JOB})
    return replace(echo, tool=tool)


async def _started(stage: Calling, echoes: Sequence[Echo]) -> Handle:
    agent = AgentSpec(
        name="echo",
        instructions="Call.",
        tools=tuple(echo.tool for echo in echoes),
        max_parallel_tool_calls=32,
        sampling=Sampling(max_tokens=32_768),
    )
    return await stage.start(agent)


async def _of_temporal(name: str, handle: Handle) -> dict[str, bytes]:
    """Return what Temporal has of a job: payloads stand as they are in protobuf's bytes."""
    history = await handle.fetch_history()
    described = await handle.describe()
    return {
        f"history of the {name}": b"\n".join(e.SerializeToString() for e in history.events),
        f"description of the {name}": described.raw_description.SerializeToString(),
        f"details of the {name}": (await current_details(handle)).encode(),
    }


async def _shown(
    name: str, shell: CommandLine, handle: Handle, *views: Sequence[str]
) -> dict[str, bytes]:
    """Return what the commands print of a job."""
    places: dict[str, bytes] = {}
    for options in views:
        done = await shell.run("show", handle.id, *options)
        assert done.status == 0, done
        places[f"muster show {' '.join(options)} of the {name}"] = (done.out + done.err).encode()
    return places


async def _tables(database: Database, *jobs: Handle) -> bytes:
    """Return every value of every table, those of the archive of these jobs included."""
    for handle in jobs:
        run_id = (await handle.describe()).run_id
        async with database.engine.begin() as connection:
            await export_run(handle._client, connection, handle.id, run_id)
            await refold(connection, handle.id)
    values: list[bytes] = []
    async with database.engine.connect() as connection:
        named = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
        for (table,) in list(await connection.execute(sql(named))):
            for row in await connection.execute(sql(f'SELECT * FROM "{table}"')):
                values += map(_plain, row)
    return b"\n".join(values)


def _told(result: object) -> str:
    return json.dumps(result, ensure_ascii=False)


def _plain(value: object) -> bytes:
    if not isinstance(value, bytes):
        return str(value).encode()
    return gzip.decompress(value) if value.startswith(b"\x1f\x8b") else value
