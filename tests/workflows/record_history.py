"""Save the history of a job with turns of all kinds, for replay by later versions.

`python -m tests.workflows.record_history ADDRESS NAME` runs the job on the Temporal server at
ADDRESS, which must know our search attributes, and writes `histories/NAME.json`. Histories that
were saved are kept: they stand for jobs that run while a new version is deployed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from muster.connection import connect_to
from tests.workflows.stage import Stage
from tests.workflows.test_replay import SHOP, SPEC, long_job


async def history(address: str) -> str:
    """Run the job and return its history as JSON."""
    async with Stage(await connect_to(address, role="test")) as stage:
        handle, _ = await stage.start(SPEC, *long_job(), tools=SHOP)
        await handle.result()
        return (await handle.fetch_history()).to_json()


if __name__ == "__main__":
    path = Path(__file__).parent / "histories" / f"{sys.argv[2]}.json"
    path.write_text(asyncio.run(history(sys.argv[1])))
    os._exit(0)  # the SDK can crash an interpreter that is finalised
