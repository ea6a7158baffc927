"""`muster rebuild`: the projections made anew from histories."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import typer
from temporalio.service import RPCError

from muster.cli.option import DataDir, Json
from muster.connection import connect
from muster.database_url import database_url
from muster.job_error import refusal
from muster.settings import Settings, load_settings

if TYPE_CHECKING:
    from muster.rebuild import Rebuilt


def rebuild(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Make the tables `jobs`, `turns` and `calls` anew from the histories of all closed runs."""
    done = asyncio.run(_rebuild(load_settings(data_dir=data_dir)))
    if as_json:
        typer.echo(json.dumps(done.model_dump(), indent=2))
        return
    typer.echo(f"jobs           {done.jobs:>10,}")
    typer.echo(f"turns          {done.turns:>10,}")
    typer.echo(f"runs archived  {done.archived_runs:>10,}  (the server alone had them)")
    typer.echo(f"jobs dropped   {done.dropped_jobs:>10,}  (no history stands behind them)")


async def _rebuild(settings: Settings) -> Rebuilt:
    # Here, since SQLAlchemy takes long to load.
    from muster.rebuild import rebuild as rebuild_projections
    from store.database import Database

    database = Database(database_url(settings), pool_size=1)
    try:
        await database.check()
        return await rebuild_projections(await connect(settings), database)
    except RPCError as error:
        raise refusal(error) from error
    finally:
        await database.close()
