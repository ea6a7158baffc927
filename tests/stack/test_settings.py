"""Settings come from the environment, are checked once, and reach a child unchanged."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from contracts.error import BadInputError
from muster.settings import Settings, load_settings
from muster.stack.log_file import bound, last_line_since, said_since
from muster.stack.port import UNASSIGNED, bound_socket, check_ports, free_port
from muster.stack.state import (
    PartRecord,
    PartState,
    StackPhase,
    StackRecord,
    hide_password,
    hold_lock,
    holder_pid,
    locate,
    running_stack,
    write_record,
)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"MUSTER_{name.upper()}", raising=False)
    monkeypatch.setenv("MUSTER_DATA_DIR", str(tmp_path))


def test_child_reads_the_same_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = load_settings(
        model=str(tmp_path / "some model.v2"),
        temporal_port=7000,
        tool_path=f"{tmp_path}:{tmp_path / 'b'}",
        start_timeout="PT90S",
        max_model_len=2048,
        openai_api_key="secret",
        tenant_weights="acme=3,trial=0.5",
    )
    assert settings.tenant_weights == {"acme": 3.0, "trial": 0.5}
    assert "secret" not in repr(settings)
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    assert load_settings() == settings


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("MUSTER_TEMPORAL_PORT", "0", "MUSTER_TEMPORAL_PORT is '0': "),
        ("MUSTER_ENGINE", "gpt", "MUSTER_ENGINE is 'gpt': "),
        ("MUSTER_TEMPORAL_UI_PORT", "7233", "settings: ports must differ"),
        ("MUSTER_MODEL_NAME", "a b", "MUSTER_MODEL_NAME is 'a b': "),
        ("MUSTER_START_TIMEOUT", "soon", "MUSTER_START_TIMEOUT is 'soon': "),
        ("MUSTER_TEMPORAL_ADDRESS", ":::", "MUSTER_TEMPORAL_ADDRESS is ':::': it should be host"),
        ("MUSTER_TEMPORAL_ADDRESS", "temporal", "MUSTER_TEMPORAL_ADDRESS is 'temporal': "),
        ("MUSTER_TEMPORAL_ADDRESS", "http://t:1", "MUSTER_TEMPORAL_ADDRESS is 'http://t:1': "),
        ("MUSTER_TEMPORAL_ADDRESS", "t:65536", "MUSTER_TEMPORAL_ADDRESS is 't:65536': "),
        ("MUSTER_INFERENCE_URL", "http://i:abc", "MUSTER_INFERENCE_URL is 'http://i:abc': it sho"),
        ("MUSTER_ENGINE", "openai", "settings: the engine openai needs openai_url"),
        ("MUSTER_OPENAI_URL", "localhost:8000", "MUSTER_OPENAI_URL is 'localhost:8000': it should"),
        ("MUSTER_TENANT_WEIGHTS", "acme", "MUSTER_TENANT_WEIGHTS is 'acme': "),
        ("MUSTER_TENANT_WEIGHTS", "acme=0", "MUSTER_TENANT_WEIGHTS is 'acme=0': weights should"),
        ("MUSTER_INFERENCE_URL", "i:8100", "MUSTER_INFERENCE_URL is 'i:8100': "),
        ("MUSTER_INFERENCE_URL", "http://[i", "MUSTER_INFERENCE_URL is 'http://[i': "),
    ],
)
def test_wrong_value_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(BadInputError) as raised:
        load_settings()
    assert raised.value.message.startswith(said)
    assert raised.value.hint


@pytest.mark.parametrize("address", ["temporal:7233", "10.0.0.1:1", "[::1]:7233", "a.b-c_d:65535"])
def test_addresses_of_servers_are_understood(address: str) -> None:
    assert load_settings(temporal_address=address).temporal_address == address
    url = f"https://{address}/path"
    assert load_settings(inference_url=url).inference_url == url


def test_seconds_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_DRAIN_TIMEOUT", "2.5")
    assert load_settings().drain_timeout.total_seconds() == 2.5


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2", "smollm2"),
        ("/models/Qwen2.5 0.5B/", "Qwen2-5-0-5B"),
        ("org/Model.v1", "Model-v1"),
        ("/models/7b", "model-7b"),
    ],
)
def test_served_name_fits_a_task_queue(model: str, name: str) -> None:
    assert load_settings(model=model).served_model == name
    assert load_settings(model=model, model_name="mine").served_model == "mine"


def test_addresses_come_from_settings_then_from_the_running_stack(tmp_path: Path) -> None:
    settings = load_settings()
    assert locate(settings).temporal_address == "127.0.0.1:7233"
    assert locate(settings).database_url == ""
    record = StackRecord(
        phase=StackPhase.UP,
        supervisor_pid=1,
        since=0.0,
        temporal_address="127.0.0.1:1",
        temporal_namespace="default",
        temporal_ui_url="http://127.0.0.1:2",
        database_url="postgresql://muster@/muster",
        inference_url="http://127.0.0.1:3",
        model="m",
        engine="simulated",
        parts=(PartRecord(name="temporal", state=PartState.UP),),
    )
    write_record(tmp_path, record)
    assert running_stack(tmp_path) is None, "a record without a lock is a leftover"
    with hold_lock(tmp_path) as held:
        assert held
        assert holder_pid(tmp_path) is not None
        assert running_stack(tmp_path) == record
        assert locate(settings).temporal_address == "127.0.0.1:1"
        assert locate(load_settings(temporal_address="there:9")).temporal_address == "there:9"
        with hold_lock(tmp_path) as second:
            assert not second
    assert holder_pid(tmp_path) is None


def test_free_ports_pass_the_check() -> None:
    check_ports({"temporal_port": free_port()})


def test_a_free_port_is_not_one_of_those_for_outgoing_connections() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        assert free_port() < UNASSIGNED[1] <= listener.getsockname()[1]


def test_a_port_is_held_from_its_binding_on_and_its_holder_is_named() -> None:
    port = free_port()
    with bound_socket("127.0.0.1", port, "MUSTER_INFERENCE_PORT") as bound:
        bound.listen()
        with pytest.raises(
            BadInputError, match=f"^port {port} is taken by .*pid {os.getpid()}"
        ) as caught:
            bound_socket("127.0.0.1", port, "MUSTER_INFERENCE_PORT")
    assert "MUSTER_INFERENCE_PORT" in caught.value.hint


def test_log_is_bounded_and_its_last_error_is_found(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    log.write_text("error: old\n" + "x" * 100)
    offset = log.stat().st_size
    assert said_since(log, offset) is None
    assert last_line_since(log, offset) == ""
    with log.open("a") as file:
        file.write("\nerror: first\nhint: h1\nnoise\nerror: second\nhint: h2\n")
    said = said_since(log, offset)
    assert said is not None
    assert (said.message, said.hint) == ("second", "h2")
    assert last_line_since(log, offset) == "hint: h2"
    bound(tmp_path, max_bytes=50)
    assert log.stat().st_size == 0
    assert (tmp_path / "part.log.1").read_text().startswith("error: old")


def test_password_is_not_shown() -> None:
    assert hide_password("postgresql://u:secret@h/d") == "postgresql://u:…@h/d"
    assert hide_password("postgresql://u@/d?host=/tmp") == "postgresql://u@/d?host=/tmp"
