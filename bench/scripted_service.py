"""An inference service on the simulated engine whose jobs make a given number of tool calls.

`python -m bench.scripted_service TEMPORAL DATABASE MODEL CALLS TOOL_BYTES MAX_MODEL_LEN` serves
`MODEL` until SIGTERM, and prints one line when it is about to. Step n of a job calls the tool
`page` while n is at most CALLS; then it answers.
"""

from __future__ import annotations

import asyncio
import json
import sys

from bench.stack import simulated_service
from inference_service.engine.protocol import EngineRequest
from inference_service.engine.simulated import SimulatedConfig, SimulatedEngine
from inference_service.worker import WorkerSettings, serve
from muster import exit as way_out
from muster.connection import connect_to
from muster.worker.lifecycle import stop_event
from store.database import Database


async def run(
    address: str, database_url: str, model: str, calls: int, size: int, longest: int
) -> None:
    """Serve until SIGTERM."""

    def respond(request: EngineRequest, _prompt: str) -> str:
        number = int(request.request_id.split("#")[0].rpartition("/")[2])
        if number > calls:
            return json.dumps({"answer": f"Read {calls} pages."})
        return json.dumps({"tool": "page", "arguments": {"number": number, "size": size}})

    config = SimulatedConfig(
        num_blocks=-(-2 * longest // 32), max_model_len=longest, time_scale=0.0
    )
    engine = SimulatedEngine(config, respond)
    database = Database(database_url)
    stop = stop_event()
    try:
        service = await simulated_service(engine, database, replica="scripted")
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await serve(
            await connect_to(address),
            service,
            model=model,
            stop=stop,
            settings=WorkerSettings(),
            identity="scripted",
        )
    finally:
        await engine.close()
        await database.close()


def main() -> int:
    """Run from the command line."""
    address, database_url, model, *numbers = sys.argv[1:]
    calls, size, longest = map(int, numbers)
    asyncio.run(run(address, database_url, model, calls, size, longest))
    return 0


if __name__ == "__main__":
    way_out.run(main)
