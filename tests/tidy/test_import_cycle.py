"""Modules import each other in one direction only. (Who may import whom: import-linter.)"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path


def imported_names(source: str) -> set[str]:
    """Return the dotted names that a module imports, at any depth of its code."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return module -> modules it imports, for sources given as module name -> text."""
    graph: dict[str, set[str]] = {module: set() for module in sources}
    for module, source in sources.items():
        for name in imported_names(source):
            target = name if name in sources else name.rpartition(".")[0]
            if target in sources and target != module:
                graph[module].add(target)
    return graph


def find_cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of one cycle, each importing the one before; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return []


def module_name(file: Path, root: Path) -> str:
    """Return the dotted name of a file's module."""
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_module_is_in_an_import_cycle(root: Path, python_files: list[Path]) -> None:
    sources = {module_name(file, root): file.read_text() for file in python_files}
    assert find_cycle(import_graph(sources)) == []


def test_a_cycle_is_found() -> None:
    sources = {
        "a": "from b import c",
        "b.c": "import d",
        "b": "",
        "d": "def late():\n    from a import name",
    }
    assert set(find_cycle(import_graph(sources))) == {"a", "b.c", "d"}
    assert find_cycle(import_graph({**sources, "d": "import json"})) == []
