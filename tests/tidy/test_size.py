"""A function fits a screen and a file fits a head."""

from __future__ import annotations

import ast
from pathlib import Path

MAX_FUNCTION_LINES = 70
MAX_FILE_LINES = 400


def long_functions(source: str) -> list[str]:
    """Return `name (n lines)` of each function longer than the limit, decorators not counted."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                found.append(f"{node.name} ({lines} lines)")
    return found


def test_functions_have_at_most_70_lines(root: Path, python_files: list[Path]) -> None:
    found = [
        f"{file.relative_to(root)}: {function}"
        for file in python_files
        for function in long_functions(file.read_text())
    ]
    assert not found, "\n".join(found)


def test_files_have_at_most_400_lines(root: Path, python_files: list[Path]) -> None:
    lengths = {file.relative_to(root): len(file.read_text().splitlines()) for file in python_files}
    found = [f"{file}: {n} lines" for file, n in lengths.items() if n > MAX_FILE_LINES]
    assert not found, "\n".join(found)


def test_a_long_function_is_found() -> None:
    fits = "def fits():\n" + "    x = 1\n" * 69
    too_long = "class A:\n    async def too_long(self):\n" + "        x = 1\n" * 70
    assert long_functions(fits + too_long) == ["too_long (71 lines)"]
