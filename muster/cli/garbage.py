"""`muster gc`: what no live or kept job can reach, counted or deleted."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from contracts.error import BadInputError
from muster.cli.option import DataDir, Json
from muster.cli.view import console
from muster.connection import connect
from muster.database_url import database_url
from muster.duration import parse_duration
from muster.kept_job import kept_job_ids
from muster.settings import Settings, load_settings

if TYPE_CHECKING:
    from store.garbage import Garbage

COMMAND_TIMEOUT = timedelta(hours=1)
"""Finding what can be reached reads whole tables."""


def gc(
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete it; without, it is only counted.")
    ] = False,
    grace: Annotated[
        str, typer.Option(help="Content younger than this stays, as in 36h; 2h at least.")
    ] = "24h",
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Count, or delete, stored content that no live or kept job can reach."""
    settings = load_settings(data_dir=data_dir)
    kept, found = asyncio.run(_collect(settings, _grace(grace), delete=delete))
    if as_json:
        tables = {table: asdict(garbage) for table, garbage in found.items()}
        typer.echo(json.dumps({"deleted": delete, "kept_jobs": kept, "tables": tables}, indent=2))
        return
    console().print(_table(found))
    done = "deleted" if delete else "nothing is deleted yet: muster gc --delete"
    typer.echo(f"{kept:,} jobs are live or kept; {done}")


def _grace(text: str) -> timedelta:
    try:
        return parse_duration(text)
    except ValueError:
        raise BadInputError(
            f"--grace {text!r} is no duration", hint="write it as in 24h or 7d"
        ) from None


async def _collect(
    settings: Settings, grace: timedelta, *, delete: bool
) -> tuple[int, dict[str, Garbage]]:
    """Return how many jobs are kept, and what was found or deleted."""
    # Here, since they bring the database's driver, which other commands do without.
    from store.archive import HistoryArchive
    from store.database import Database
    from store.garbage import collect

    client = await connect(settings)
    database = Database(database_url(settings), pool_size=1, command_timeout=COMMAND_TIMEOUT)
    try:
        await database.check()
        kept = await kept_job_ids(client) | await HistoryArchive(database).all_job_ids()
        return len(kept), await collect(database, kept, grace=grace, delete=delete)
    finally:
        await database.close()


def _table(found: dict[str, Garbage]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("out of reach")
    table.add_column("rows", justify="right")
    table.add_column("bytes", justify="right")
    for name, garbage in found.items():
        table.add_row(name, f"{garbage.rows:,}", f"{garbage.bytes:,}")
    return table
