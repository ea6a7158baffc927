"""An embedded stack of its own for a benchmark: fresh data, free ports, stopped at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from inference_service.engine.simulated import SimulatedEngine
from inference_service.scheduler.event import CapacityChanged
from inference_service.scheduler.ready_cohort import ReadyCohort
from inference_service.service import InferenceService
from muster.stack.port import free_port
from store.context import ContextStore
from store.database import Database
from store.step_ledger import StepLedger


@dataclass(frozen=True, slots=True)
class BenchStack:
    """Where a running stack is, and which process is which part."""

    temporal_address: str
    database_url: str
    inference_url: str
    pids: Mapping[str, int]

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds that each part and its children have used so far."""
        used: dict[str, float] = {}
        for name, pid in self.pids.items():
            root = psutil.Process(pid)
            times = [p.cpu_times() for p in (root, *root.children(recursive=True))]
            used[name] = sum(t.user + t.system for t in times)
        return used

    def rss_mb(self, name: str) -> float:
        """Return the resident memory of one part, in MB (its children not counted)."""
        return psutil.Process(self.pids[name]).memory_info().rss / 1e6


async def simulated_service(
    engine: SimulatedEngine, database: Database, *, replica: str
) -> InferenceService:
    """Start an engine and return a service on it, with the usual scheduler."""
    capacity = await engine.start()
    size = CapacityChanged(
        max_num_seqs=capacity.max_num_seqs,
        num_blocks=capacity.kv_tokens // capacity.block_size,
        block_size=capacity.block_size,
        max_model_len=capacity.max_model_len,
        prefill_tokens=2 * capacity.max_num_batched_tokens,
    )
    return InferenceService(
        engine=engine,
        scheduler=ReadyCohort(size),
        ledger=StepLedger(database),
        contexts=ContextStore(database),
        replica=replica,
    )


@contextmanager
def embedded_stack(*, only: str = "", **settings: str) -> Iterator[BenchStack]:
    """Run `muster up` in a temporary directory; `settings` are MUSTER_… variables, lower case.

    `only` names the parts that are started, separated by commas; all by default.
    """
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as data_dir:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MUSTER_")} | {
            "MUSTER_DATA_DIR": data_dir,
            "MUSTER_TEMPORAL_PORT": str(free_port()),
            "MUSTER_TEMPORAL_UI_PORT": str(free_port()),
            "MUSTER_INFERENCE_PORT": str(free_port()),
            "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
            **{f"MUSTER_{name}".upper(): value for name, value in settings.items()},
        }

        def muster(*arguments: str) -> None:
            command = [sys.executable, "-m", "muster", *arguments]
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)

        muster("up", "--detach", *(("--only", only) if only else ()))
        try:
            record = json.loads((Path(data_dir) / "stack.json").read_text())
            yield BenchStack(
                temporal_address=record["temporal_address"],
                database_url=record["database_url"],
                inference_url=record["inference_url"],
                pids={part["name"]: part["pid"] for part in record["parts"] if part["pid"]},
            )
        finally:
            muster("down")
