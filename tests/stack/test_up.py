"""`muster up` and `down`: one stack per data directory, clear refusals, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
from importlib.metadata import version
from pathlib import Path

from muster.stack.port import free_port
from tests.stack.command_line import CommandLine, is_gone, kill, wait_until


def test_up_prints_urls_and_down_leaves_no_process(muster: CommandLine) -> None:
    done = muster.run("up", "--detach", "--only", "temporal,postgres,agents")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    shown = [line for line in lines if line.startswith("  Temporal UI")]
    assert shown == [
        f"  Temporal UI   http://127.0.0.1:{muster.environment['MUSTER_TEMPORAL_UI_PORT']}"
    ]
    assert lines.index(shown[0]) < min(n for n, line in enumerate(lines) if "  PostgreSQL" in line)

    status = muster.status()
    assert status["up"]
    assert {part["name"]: part["state"] for part in status["parts"]} == {
        "temporal": "up",
        "postgres": "up",
        "agents": "up",
    }
    processes = muster.processes()
    assert len(processes) > 4, "supervisor, three parts and PostgreSQL's own children"

    done = muster.run("down")
    assert done.returncode == 0, done.stderr
    assert [process for process in processes if not is_gone(process)] == []
    assert not (muster.data_dir / "stack.json").exists()


def test_second_up_says_that_it_is_up(muster: CommandLine) -> None:
    muster.up("postgres")
    for arguments in (["up"], ["up", "--detach"]):
        done = muster.run(*arguments)
        assert done.returncode == 0
        assert "is up already" in done.stdout
    assert muster.status()["parts"][0]["restarts"] == 0


def test_up_again_keeps_the_state(muster: CommandLine) -> None:
    muster.up("postgres")
    first = muster.part("postgres")["pid"]
    muster.end()
    muster.up("postgres")
    assert muster.part("postgres")["pid"] != first
    assert (muster.data_dir / "log" / "postgres.log").read_text().count("initdb") <= 1


def test_down_and_status_of_a_stack_that_is_down(muster: CommandLine) -> None:
    assert muster.run("down").returncode == 0
    done = muster.run("status")
    assert done.returncode == 1
    assert "muster up" in done.stdout
    assert json.loads(muster.run("status", "--json").stdout) == {
        "up": False,
        "phase": "down",
        "parts": [],
        "inference": None,
        "cohorts": None,
    }


def test_version_is_the_package_s(muster: CommandLine) -> None:
    done = muster.run("--version")
    assert (done.returncode, done.stdout) == (0, f"muster {version('muster')}\n")


def test_ctrl_c_in_the_foreground_stops_everything(muster: CommandLine) -> None:
    process = muster.start("up", "--only", "temporal,postgres")
    assert process.stdout is not None
    wait_until(lambda: muster.run("status").returncode == 0)
    children = muster.processes()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "is up." in output
    assert all(is_gone(child) for child in children)


def test_stop_while_starting_leaves_no_process(muster: CommandLine) -> None:
    process = muster.start("up", "--only", "temporal,postgres")
    wait_until((muster.data_dir / "stack.json").exists)
    wait_until(lambda: muster.part("postgres")["state"] != "waiting")
    children = muster.processes()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert all(is_gone(child) for child in children)
    assert not (muster.data_dir / "stack.json").exists()


def test_taken_port_is_named_with_its_holder_before_anything_starts(muster: CommandLine) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", muster.temporal_port))
        holder.listen()
        for arguments in (["up"], ["up", "--detach"]):
            done = muster.run(*arguments, "--only", "temporal,postgres")
            assert done.returncode == 1
            error, hint = done.stderr.splitlines()
            assert error.startswith(f"error: port {muster.temporal_port} is taken by ")
            assert f"(pid {os.getpid()}, " in error
            assert hint.startswith("hint: ")
            assert "MUSTER_TEMPORAL_PORT" in hint
    assert not (muster.data_dir / "postgres").exists()


def test_data_dir_that_cannot_be_written_is_one_clear_error(
    muster: CommandLine, tmp_path: Path
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    done = muster.run("up", MUSTER_DATA_DIR=str(blocker / "data"))
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()
    assert (
        error == f"error: data directory {str(blocker / 'data')!r} is not writable: Not a directory"
    )
    assert "MUSTER_DATA_DIR" in hint


def test_part_that_cannot_start_fails_up_with_its_own_error(muster: CommandLine) -> None:
    done = muster.run("up", "--detach", "--only", "agents")
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()
    assert error == (
        f"error: agents: no Temporal server answers at 127.0.0.1:{muster.temporal_port}"
    )
    assert "muster up" in hint
    assert muster.run("status").returncode == 1


def test_part_that_ends_without_an_error_of_ours_tells_what_it_said_last(
    muster: CommandLine,
) -> None:
    (muster.data_dir / "temporal" / "temporal.db").mkdir(parents=True)
    done = muster.run("up", "--detach", "--only", "temporal")
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: temporal ended with status 1 while it started: ")
    assert "temporal.db" in error or "unable to open database" in error
    assert "temporal.log" in hint


def test_external_server_that_does_not_answer_is_one_clear_error(muster: CommandLine) -> None:
    address = f"127.0.0.1:{free_port()}"
    done = muster.run("up", "--only", "postgres", MUSTER_TEMPORAL_ADDRESS=address)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == f"error: no Temporal server answers at {address}"


def test_killed_supervisor_leaves_no_process_and_up_recovers(muster: CommandLine) -> None:
    muster.up("temporal,postgres,agents")
    processes = muster.processes()
    kill(muster.supervisor().pid)
    wait_until(lambda: all(is_gone(process) for process in processes), timeout_s=10)
    assert not muster.status()["up"]
    muster.up("temporal,postgres,agents")
    assert muster.status()["up"]


def test_unknown_part_and_unknown_option_are_refused(muster: CommandLine) -> None:
    done = muster.run("up", "--only", "postgres,nothing")
    assert done.returncode == 1
    assert done.stderr.startswith("error: no such part: nothing\nhint: ")
    assert muster.run("up", "--nothing").returncode == 2
    done = muster.run("status", MUSTER_TEMPORAL_PORT="many")
    assert done.returncode == 1
    assert done.stderr.startswith("error: MUSTER_TEMPORAL_PORT is 'many'")
