"""Save the history of a job with turns of all kinds, for replay by later versions.

`python -m tests.workflows.record_history NAME` writes `histories/NAME.json`. Histories that were
saved are kept: they stand for jobs that run while a new version is deployed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from tests.workflows.conftest import start_server
from tests.workflows.stage import Stage
from tests.workflows.test_replay import SHOP, SPEC, long_job


async def history() -> str:
    """Run a job on a real server and return its history as JSON."""
    async with await start_server() as server, Stage(server.client) as stage:
        handle, _ = await stage.start(SPEC, *long_job(), tools=SHOP)
        await handle.result()
        return (await handle.fetch_history()).to_json()


if __name__ == "__main__":
    path = Path(__file__).parent / "histories" / f"{sys.argv[1]}.json"
    path.write_text(asyncio.run(history()))
    os._exit(0)  # the SDK can crash an interpreter that is finalised
