"""Preparing a model: what is served, what is refused, what is made anew."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from contracts.error import BadInputError
from inference_service.model import (
    MODELS,
    ModelChecksumError,
    ModelFiles,
    prepare_model,
    served_name,
)

pytestmark = pytest.mark.timeout(600)


def silent(_line: str) -> None:
    """Show no progress."""


def checkpoint(path: Path) -> Path:
    """Make a directory that looks like a model."""
    path.mkdir()
    (path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def test_directory_with_a_config_is_served_as_it_is(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "Qwen2.5-7B")
    files = prepare_model(str(path), tmp_path / "data", silent)
    assert files.path == path
    assert files.name == "Qwen2-5-7B"
    assert not (tmp_path / "data").exists()


def test_digest_of_a_directory_tells_other_weights_apart(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model")
    before = prepare_model(str(path), tmp_path, silent)
    assert prepare_model(str(path), tmp_path, silent) == before
    (path / "model.safetensors").write_bytes(b"other weights")
    assert prepare_model(str(path), tmp_path, silent).digest != before.digest


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("smollm2", "smollm2"),
        ("Llama-3.1 8B", "Llama-3-1-8B"),
        ("7b", "model-7b"),
        ("a" * 80, "a" * 64),
    ],
)
def test_served_name_fits_task_queues_and_agent_files(name: str, served: str) -> None:
    assert served_name(Path("/models") / name) == served


def test_directory_without_a_config_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="model path that is not a model") as caught:
        prepare_model(str(tmp_path), tmp_path, silent)
    assert "config.json" in caught.value.hint


def test_file_is_not_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(BadInputError, match=r"not a model.*not a directory"):
        prepare_model(str(file), tmp_path, silent)


@pytest.mark.parametrize("name", ["smollm3", "/no/such/path", "./nothing", "a/b/c"])
def test_unknown_model_is_refused_with_the_names_known(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="neither a known name nor a path") as caught:
        prepare_model(name, tmp_path, silent)
    assert "smollm2" in caught.value.hint


def test_data_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    with pytest.raises(BadInputError, match=r"cannot be kept in the data directory"):
        prepare_model("smollm2", file / "data", silent)


def test_source_with_another_checksum_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "other", replace(MODELS["smollm2"], sha256="0" * 64))
    with pytest.raises(ModelChecksumError, match="expected 0000") as caught:
        prepare_model("other", tmp_path, silent)
    assert "--force-reinstall" in caught.value.hint
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.slow
def test_prepared_model_is_reused_and_a_damaged_one_is_made_anew(
    tmp_path: Path, model_files: ModelFiles
) -> None:
    shutil.copytree(model_files.path, tmp_path / "models" / model_files.path.name)
    said: list[str] = []
    kept = prepare_model("smollm2", tmp_path, said.append)
    assert kept.digest == model_files.digest
    assert said == []
    (kept.path / "config.json").write_text("{}")
    again = prepare_model("smollm2", tmp_path, said.append)
    assert [line.partition(" ")[0] for line in said] == ["the", "converting", "smollm2"]
    assert again.path == kept.path
    assert (kept.path / "config.json").stat().st_size > 2
    assert [path.name for path in (tmp_path / "models").iterdir()] == [kept.path.name]


@pytest.mark.slow
def test_prepared_model_names_its_source(model_files: ModelFiles) -> None:
    assert model_files.name == "smollm2"
    assert MODELS["smollm2"].sha256[:12] in model_files.path.name


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the module as a program."""
    return subprocess.run(
        [sys.executable, "-m", "inference_service.model", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_program_prints_the_directory(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model")
    done = run_program(str(path), str(tmp_path))
    assert (done.returncode, done.stdout) == (0, f"{path}\n")


def test_program_says_what_is_wrong_in_one_line_and_a_hint(tmp_path: Path) -> None:
    done = run_program(str(tmp_path), str(tmp_path))
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    assert run_program().returncode == 2
