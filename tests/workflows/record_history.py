"""Save histories of jobs of each kind, for replay by later versions.

`python -m tests.workflows.record_history [NAME …]` runs the jobs on a server of its own, on which
they roll over after few events, and writes `histories/NAME.json`, one file for each run of a job
(`NAME_2.json`, … for those after the first). Without names: the jobs that have no file yet.
Histories that were saved are kept: they stand for jobs that run while a new version is deployed.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from temporalio.client import WorkflowHistory

from muster.connection import connect_to
from muster.stack.namespace import prepare_namespace
from muster.stack.part import start_part
from muster.stack.port import free_port
from tests.workflows.conftest import RollingTemporal
from tests.workflows.kind_of_job import DIRECTORY, KINDS
from tests.workflows.stage import Stage

ROOT = DIRECTORY.parents[2]


async def histories(names: list[str]) -> dict[str, list[WorkflowHistory]]:
    """Run the named jobs and return their histories, the first run's first."""
    found: dict[str, list[WorkflowHistory]] = {}
    part = RollingTemporal(port=free_port(), ui_port=None, namespace="default", directory=None)
    with tempfile.TemporaryDirectory() as directory:
        child = await start_part(part, Path(directory) / "temporal.log", 60.0)
        try:
            await prepare_namespace(await part.connect())
            async with Stage(await connect_to(part.address, role="test")) as stage:
                for name in names:
                    handle = await KINDS[name](stage)
                    await handle.result()
                    found[name] = (await stage.histories(handle))[::-1]
        finally:
            await child.stop()
    return found


def main() -> None:
    """Write the files."""
    wanted = sys.argv[1:] or [name for name in KINDS if not (DIRECTORY / f"{name}.json").exists()]
    for name, runs in asyncio.run(histories(wanted)).items():
        for number, run in enumerate(runs, 1):
            path = DIRECTORY / f"{name}{f'_{number}' if number > 1 else ''}.json"
            path.write_text(run.to_json().replace(f"{ROOT}/", ""))  # in stack traces
            sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the SDK can crash an interpreter that is finalised
