"""What the tidiness tests look at: every source file of the project, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

PACKAGES = (
    "activities",
    "contracts",
    "inference_service",
    "migrations",
    "muster",
    "store",
    "workflows",
)
FOLDERS = (*PACKAGES, "bench", "docker", "examples", "tests")
TEXT_FOLDERS = (*FOLDERS, ".ci", "docs")
TEXT_SUFFIXES = {
    *(".cfg", ".html", ".ini", ".js", ".json", ".mako", ".md", ".py", ".sql", ".svg", ".toml"),
    *(".txt", ".yaml", ".yml", ""),
}


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the repository's root."""
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def packages() -> tuple[str, ...]:
    """Return the top-level packages that an installation holds."""
    return PACKAGES


@pytest.fixture(scope="session")
def python_files(root: Path) -> list[Path]:
    """Return every Python file, tests included."""
    files = [file for folder in FOLDERS for file in sorted((root / folder).rglob("*.py"))]
    assert len(files) > 10, "the walk over the sources found almost nothing"
    return files


@pytest.fixture(scope="session")
def text_files(root: Path) -> list[Path]:
    """Return every file a person wrote, data of the examples left out."""
    files = [file for file in sorted(root.iterdir()) if file.is_file()]
    for folder in TEXT_FOLDERS:
        files += (file for file in sorted((root / folder).rglob("*")) if file.is_file())
    return [
        file
        for file in files
        if file.suffix in TEXT_SUFFIXES
        and "__pycache__" not in file.parts
        and "data" not in file.relative_to(root).parts
        and file.name != ".git"
    ]
