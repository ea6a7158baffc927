"""The images: pinned, not root, health-checked, built from files that exist."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from contracts.name import SEARCH_AGENT, SEARCH_STATE, SEARCH_TENANT, SEARCH_WAITING_FOR
from muster.settings import ENV_PREFIX, Settings

DOCKERFILES = ("Dockerfile.inference", "Dockerfile.worker")
INSTRUCTIONS = {
    *("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK"),
    *("LABEL", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
}
NOT_SETTINGS = {"MUSTER_POSTGRES_PASSWORD", "MUSTER_VERSION", "MUSTER_MODEL_DIR", "MUSTER_GPU"} | {
    "MUSTER_TOOLS_DIR"
}
"""Variables of the compose file itself, read by no process of ours."""


def instructions(text: str) -> list[tuple[str, str]]:
    """Return a Dockerfile's (instruction, arguments), continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    found = []
    for line in filter(None, (line.strip() for line in joined.splitlines())):
        name, _, arguments = line.partition(" ")
        found.append((name, arguments.strip()))
    return found


def faults(text: str) -> list[str]:
    """Return what is wrong with a Dockerfile."""
    parsed = instructions(text)
    found = [f"no instruction: {name}" for name, _ in parsed if name not in INSTRUCTIONS]
    for name, arguments in parsed:
        if name == "FROM" and not re.match(r"\S+:\d+\.\d+\.\d+\S*( AS \w+)?$", arguments):
            found.append(f"base image is not pinned: {arguments}")
        if name in {"CMD", "ENTRYPOINT", "HEALTHCHECK"}:
            command = arguments.partition(" CMD ")[2] if name == "HEALTHCHECK" else arguments
            try:
                json.loads(command)
            except ValueError:
                found.append(f"{name} is no list: {command}")
    last = dict(parsed)
    if last.get("USER", "root") in {"root", "0"}:
        found.append("runs as root")
    if "HEALTHCHECK" not in last:
        found.append("no health check")
    return found


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_are_pinned_checked_and_not_root(root: Path, name: str) -> None:
    assert faults((root / "docker" / name).read_text()) == []


def test_faults_are_found() -> None:
    wrong = "FROM python:latest\nCOPI a b\nRUN a && \\\n    b\nCMD muster\nUSER root\n"
    assert faults(wrong) == [
        "no instruction: COPI",
        "base image is not pinned: python:latest",
        "CMD is no list: muster",
        "runs as root",
        "no health check",
    ]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_every_copied_file_exists_and_reaches_the_build(root: Path, name: str) -> None:
    kept = {
        line[1:]
        for line in (root / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    for instruction, arguments in instructions((root / "docker" / name).read_text()):
        if instruction == "COPY" and not arguments.startswith("--from"):
            for source in arguments.split()[:-1]:
                assert source in kept
                assert (root / source).exists()


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_holds_every_package(root: Path, packages: tuple[str, ...], name: str) -> None:
    text = (root / "docker" / name).read_text()
    assert [package for package in packages if f"COPY {package} {package}\n" not in text] == []


def test_every_variable_of_ours_is_a_setting(root: Path) -> None:
    settings = {f"{ENV_PREFIX}{name}".upper() for name in Settings.model_fields}
    for file in ("compose.yaml", *DOCKERFILES):
        named = set(re.findall(r"\bMUSTER_[A-Z_]+\b", (root / "docker" / file).read_text()))
        assert named - settings - NOT_SETTINGS - {"MUSTER_INFERENCE_PORT"} == set(), file


@pytest.mark.parametrize("name", ["temporal-namespace.sh", "temporal-schema.sh"])
def test_scripts_parse(root: Path, name: str) -> None:
    subprocess.run(["sh", "-n", root / "docker" / name], check=True, timeout=10)


def test_the_namespace_script_registers_our_search_attributes(root: Path) -> None:
    text = (root / "docker" / "temporal-namespace.sh").read_text()
    registered = dict(re.findall(r"\b(Muster\w+):(\w+)", text))
    keywords = dict.fromkeys((SEARCH_AGENT, SEARCH_TENANT, SEARCH_STATE), "Keyword")
    assert registered == {**keywords, SEARCH_WAITING_FOR: "KeywordList"}
