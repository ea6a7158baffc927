"""What import-linter's contracts cannot say of themselves: they cover every module they should."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path
from typing import Any

WITH_TEMPORAL = {
    "agent", "approval", "calling", "failure", "hold", "job", "option", "plan", "plan_node",
    "remote", "stepping", "worker",
}  # fmt: skip
"""Modules of `workflows` that use Temporal's SDK."""


def contracts(root: Path) -> dict[str, dict[str, Any]]:
    """Return import-linter's contracts by id."""
    with (root / "pyproject.toml").open("rb") as file:
        table = tomllib.load(file)["tool"]["importlinter"]
    return {contract["id"]: contract for contract in table["contracts"]}


def imported_roots(source: str) -> set[str]:
    """Return the top-level names that a module imports."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_every_module_of_workflows_is_held_pure_or_named_here(root: Path) -> None:
    modules = {file.stem for file in (root / "workflows").glob("*.py")} - {"__init__"}
    held = contracts(root)["workflow-parts-are-pure"]["source_modules"]
    assert {name.partition(".")[2] for name in held} == modules - WITH_TEMPORAL


def test_every_package_has_its_place_in_the_layers(root: Path, packages: tuple[str, ...]) -> None:
    layers = contracts(root)["layers"]["layers"]
    assert {name.strip() for layer in layers for name in layer.split("|")} == set(packages)


def test_the_scheduler_imports_the_standard_library_and_contracts_only(root: Path) -> None:
    for file in (root / "inference_service" / "scheduler").rglob("*.py"):
        foreign = imported_roots(file.read_text()) - sys.stdlib_module_names - {"contracts"}
        assert foreign <= {"inference_service"}, file.name


def test_nothing_imports_tests_examples_or_benchmarks(
    root: Path, packages: tuple[str, ...]
) -> None:
    for package in packages:
        for file in (root / package).rglob("*.py"):
            found = imported_roots(file.read_text()) & {"bench", "examples", "tests"}
            assert not found, file.relative_to(root)


def test_imports_are_found_at_any_depth() -> None:
    source = "import a.b\nfrom c import d\ndef f():\n    import e\nif f:\n    from g.h import i\n"
    assert imported_roots(source) == {"a", "c", "e", "g"}
