"""A secret that tools give away is nowhere afterwards: a canary, looked for everywhere."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
import pytest_asyncio
from temporalio.client import Client

from tests.acceptance.leak import FOLDER, KEY, TOKEN, VIEWS, Left, found_in, leave
from tests.conftest import TEMPLATE, PostgresServer

JOBS = ("job", "failed job")
PLACES = [
    "prompts",
    "log",
    "spans",
    "tables",
    *(f"{what} of the {job}" for job in JOBS for what in ("history", "description", "details")),
    "muster show --json of the failed job",
    *(f"muster show {' '.join(options)} of the job" for options in VIEWS),
]


@pytest_asyncio.fixture(scope="module")
async def left(
    temporal_client: Client,
    postgres_server: PostgresServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Left]:
    """Return what the jobs have left, whose tools were all called in one tool worker."""
    ours, shop = (f"test_{uuid4().hex[:16]}" for _ in range(2))
    await postgres_server.execute(f"create database {ours} template {TEMPLATE}")
    await postgres_server.execute(f"create database {shop}")
    url = postgres_server.part.url
    yield await leave(temporal_client, url(ours), url(shop), tmp_path_factory.mktemp("canary"))
    await postgres_server.execute(f"drop database {ours} with (force)")
    await postgres_server.execute(f"drop database {shop} with (force)")


def test_every_tool_gave_its_secret_away_and_the_model_read_on(left: Left) -> None:
    """What is looked for was there: else the next test could not fail."""
    assert set(left.read) == {echo.tool.tool_name for echo in left.echoes}
    told = {
        echo.tool.tool_name: echo.told in left.read[echo.tool.tool_name] for echo in left.echoes
    }
    assert {name: left.read[name] for name, is_told in told.items() if not is_told} == {}


@pytest.mark.parametrize("place", PLACES)
def test_no_secret_is_left_in(left: Left, place: str) -> None:
    """Neither as it is nor as base64, hexadecimal digits, or with the escapes of URLs or JSON."""
    assert set(left.places) == set(PLACES)
    content = left.places[place]
    assert len(content) > 100
    assert found_in(content) == []


@pytest.mark.parametrize("place", ["prompts", "log", "tables", "history of the job"])
def test_what_was_taken_out_left_its_mark(left: Left, place: str) -> None:
    assert left.places[place].count(b"[secret]") > 5


@pytest.mark.parametrize("value", [TOKEN, KEY.partition("\n")[0], KEY.partition("\n")[2], FOLDER])
def test_a_leak_would_be_found(value: str) -> None:
    plain = f"user:{value}".encode()
    for shown in (
        plain,
        plain.hex().encode(),
        *map(base64.b64encode, (plain, plain[1:], plain[2:])),
    ):
        assert found_in(shown)
