"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        help="Directory of all state. [env: MUSTER_DATA_DIR; default: ~/.muster]",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of text.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, as `jobs` lists it.")]
