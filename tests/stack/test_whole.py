"""The whole stack: every part up, found well by the doctor, and no engine process left behind."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from inference_service.model import prepare_model
from tests.stack.command_line import CommandLine, is_gone, kill, wait_until

KEPT_MODELS = Path(__file__).resolve().parents[2] / ".muster"
ALL = ("temporal", "postgres", "inference", "agents", "tools")


def test_whole_stack_is_well_and_drains(muster: CommandLine) -> None:
    muster.environment["MUSTER_TOOL_GROUPS"] = "crm=5/s x2, mail"
    done = muster.run("up", "--detach")
    assert done.returncode == 0, done.stdout + done.stderr
    status = muster.status()
    assert tuple(part["name"] for part in status["parts"]) == ALL
    assert status["up"]
    assert status["inference"]["model"] == "smollm2"
    assert status["cohorts"]["scheduler"]["ready"] == 0
    assert "KV blocks" in muster.run("status").stdout
    done = muster.run("doctor")
    assert done.returncode == 0, done.stdout
    assert "FAIL" not in done.stdout
    for queue in ("tools", "tools.crm", "tools.mail"):
        assert f"0 tasks wait on '{queue}'" in " ".join(done.stdout.split()), done.stdout

    processes = muster.processes()
    assert muster.run("down").returncode == 0
    assert [process for process in processes if not is_gone(process)] == []
    log = (muster.data_dir / "log" / "stack.log").read_text()
    assert log.count("status=0") == len(ALL), "each part ended by itself when it was told to"


def test_settings_name_an_external_part(muster: CommandLine, tmp_path: Path) -> None:
    """One stack's servers are another's external ones: only the rest is started."""
    muster.up("temporal,postgres")
    record = json.loads((muster.data_dir / "stack.json").read_text())
    second = CommandLine(tmp_path / "second")
    second.environment["MUSTER_TEMPORAL_ADDRESS"] = record["temporal_address"]
    second.environment["MUSTER_DATABASE_URL"] = record["database_url"]
    try:
        second.up("inference,agents,tools")
        states = {part["name"]: part["state"] for part in second.status()["parts"]}
        assert states == {
            "temporal": "external",
            "postgres": "external",
            "inference": "up",
            "agents": "up",
            "tools": "up",
        }
        assert second.run("doctor").returncode == 0
    finally:
        second.end()
    assert muster.status()["up"]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_engine_process_outlives_its_service_or_the_supervisor(muster: CommandLine) -> None:
    model = prepare_model("smollm2", KEPT_MODELS, lambda _line: None)
    muster.environment |= {
        "MUSTER_ENGINE": "vllm",
        "MUSTER_MODEL": str(model.path),
        "MUSTER_MAX_MODEL_LEN": "1024",
        "MUSTER_MAX_NUM_SEQS": "4",
        "MUSTER_KV_CACHE_BYTES": str(64 << 20),
    }
    done = muster.run("up", "--detach", timeout_s=400)
    assert done.returncode == 0, done.stdout + done.stderr

    service = psutil.Process(muster.part("inference")["pid"])
    engine = service.children(recursive=True)
    assert len(engine) >= 2, "the engine core and its guardian"
    kill(service.pid)
    wait_until(lambda: all(is_gone(process) for process in (service, *engine)), timeout_s=15)

    wait_until(lambda: muster.part("inference")["restarts"] == 1)
    wait_until(lambda: muster.part("inference")["state"] == "up", timeout_s=400)
    processes = muster.processes()
    supervisor = muster.supervisor()
    supervisor.send_signal(signal.SIGKILL)
    wait_until(lambda: all(is_gone(process) for process in processes), timeout_s=15)
