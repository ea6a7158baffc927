"""What is written holds on any machine: no registry host, no path of one machine, no vague name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REGISTRY_HOST = re.compile(
    r"\b(?:[\w-]+\.)*(?:pypi\.org|pythonhosted\.org|npmjs\.(?:org|com)|golang\.org|crates\.io"
    r"|maven\.org|pytorch\.org/whl|huggingface\.co|debian\.org|ghcr\.io|quay\.io|gcr\.io)\b"
)
MACHINE_PATH = re.compile(r"(?<![\w.{}~$/-])/(?:work|root|home|Users)/\w")
VAGUE_NAMES = {"common", "helper", "helpers", "manager", "misc", "util", "utils"}


def violations(text: str) -> list[str]:
    """Return what in a text belongs to one machine or one registry."""
    return [
        f"line {number}: {match.group()}"
        for number, line in enumerate(text.splitlines(), start=1)
        for pattern in (REGISTRY_HOST, MACHINE_PATH)
        for match in pattern.finditer(line)
    ]


def test_no_file_names_a_registry_host_or_a_path_of_one_machine(
    root: Path, text_files: list[Path]
) -> None:
    found = [
        f"{file.relative_to(root)}: {violation}"
        for file in text_files
        if file != Path(__file__)
        for violation in violations(file.read_text())
    ]
    assert not found, "\n".join(found)


def test_no_module_or_folder_has_a_vague_name(root: Path, python_files: list[Path]) -> None:
    found = {
        str(file.relative_to(root))
        for file in python_files
        if VAGUE_NAMES & {*file.relative_to(root).with_suffix("").parts}
    }
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        "index-url = https://pypi." + "org/simple",
        "see files.python" + "hosted.org",
        'DATA = "/ro' + 'ot/muster"',
        "cd /wo" + "rk/tree",
    ],
)
def test_a_host_or_machine_path_is_found(text: str) -> None:
    assert violations(f"fine\n{text}") != []


@pytest.mark.parametrize(
    "text", ["~/.muster", "/var/lib/muster", "docs/wo" + "rk/x", "$HOME/ho" + "me/x"]
)
def test_a_path_any_machine_has_is_fine(text: str) -> None:
    assert violations(text) == []
