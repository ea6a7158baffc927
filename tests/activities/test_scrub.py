"""What leaves a tool worker holds no secret that it has read: results, errors, lines, the store."""

from __future__ import annotations

import io
import logging

import pytest
from sqlalchemy import text as sql
from temporalio.exceptions import ApplicationError

from activities.call_tool import CallTool
from activities.output import guarded_output
from activities.toolbox import Toolbox
from contracts.agent import OnFailure
from store.database import Database
from tests.activities.conftest import GOOD, HttpServer, environment, request

CANARY = 'canary/7f3a "9"'
PARTS = ("canary/7f3a", "canary%2F7f3a")


@pytest.fixture
def toolbox(monkeypatch: pytest.MonkeyPatch) -> Toolbox:
    """Return a toolbox that has read a secret."""
    monkeypatch.setenv("SHOP_TOKEN", CANARY)
    found = Toolbox()
    assert found.secrets.reveal("shop", "${env:SHOP_TOKEN}") == CANARY
    return found


async def _stored(database: Database) -> str:
    """Return every row of every table, as text."""
    async with database.engine.connect() as connection:
        tables = await connection.execute(
            sql("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        )
        rows = [
            str(list(await connection.execute(sql(f'SELECT t::text FROM "{name}" t'))))
            for (name,) in tables
        ]
    return "\n".join(rows)


def _is_clean(shown: str) -> bool:
    return not any(part in shown for part in PARTS)


async def test_results_hold_no_secret_in_the_answer_or_the_store(
    database: Database, toolbox: Toolbox, http_server: HttpServer
) -> None:
    http_server.answers = ["200 OK\n\n" + f"{CANARY} " * 2_000]
    call = request("get", {"url": http_server.url}, module=GOOD)
    result = await environment().run(CallTool(database, toolbox).call_tool, call)
    assert result.blob is not None, "a long result goes to the store"
    assert "[secret]" in result.content
    assert _is_clean(result.content)
    stored = await _stored(database)
    assert "[secret]" in stored
    assert _is_clean(stored)


@pytest.mark.parametrize("status", ["404 Not Found", "500 Internal Server Error", "401 No"])
async def test_errors_hold_no_secret(
    database: Database,
    toolbox: Toolbox,
    http_server: HttpServer,
    caplog: pytest.LogCaptureFixture,
    status: str,
) -> None:
    http_server.answers = [f"{status}\n\nno user for {CANARY}"]
    call = request(
        "get",
        {"url": http_server.url},
        module=GOOD,
        max_attempts=1,
        on_failure=OnFailure.FAIL_JOB,
    )
    tools = CallTool(database, toolbox)
    try:
        shown = (await environment().run(tools.call_tool, call)).content
    except ApplicationError as error:
        shown = f"{error.message} {error.details}"
    assert "[secret]" in shown
    assert _is_clean(shown)
    assert _is_clean(caplog.text)
    assert _is_clean(await _stored(database))


def test_what_a_process_prints_and_logs_holds_no_secret(
    toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed, logged = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stdout", printed)
    handler = logging.StreamHandler(logged)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        with guarded_output(toolbox.secrets.scrub):
            print(f"key {CANARY}")  # noqa: T201 - what a tool does
            try:
                raise ValueError(CANARY)
            except ValueError:
                logging.getLogger("some.library").exception("refused %s", CANARY)
    finally:
        root.removeHandler(handler)
    for shown in (printed.getvalue(), logged.getvalue()):
        assert "[secret]" in shown
        assert _is_clean(shown)
