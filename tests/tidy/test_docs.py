"""The documents say what the code does: every setting, every command, every example."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest
import typer
from pydantic import SecretStr, TypeAdapter
from typer.core import TyperCommand, TyperGroup, TyperOption

from activities.kind.function import load_function
from contracts.agent import AgentSpec, Limits, RetryPolicy, Sampling, ToolRef
from contracts.plan import (
    AgentNode,
    ApprovalNode,
    BranchNode,
    Case,
    JoinNode,
    LLMNode,
    MapNode,
    Plan,
    PlanLimits,
    ToolNode,
)
from contracts.tool_source import McpServer, OpenApiService, RemoteActivity, SqlDatabase
from muster.agent_file import parse_agent
from muster.cli import build_app
from muster.plan_file import parse_plan
from muster.settings import ENV_PREFIX, Settings

ROW = re.compile(r"^\| `(MUSTER_\w+)` \| (\S+) \| .{10,} \|$", re.MULTILINE)
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"^`(\w+\.\w+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


def documents(root: Path) -> list[Path]:
    """Return every document for people."""
    return [*root.glob("*.md"), *(root / "docs").rglob("*.md")]


def read(root: Path, name: str) -> str:
    """Return the text of a document under docs/."""
    return (root / "docs" / name).read_text()


def written(default: object) -> str:
    """Return a default as the reference writes it."""
    match default:
        case "" | SecretStr() | {}:  # an empty mapping is the only one that is a default
            return "empty"
        case timedelta():
            return f"`{TypeAdapter(timedelta).dump_python(default, mode='json')}`"
        case tuple():
            return f"`{':'.join(map(str, default))}`"
        case _:
            return f"`{default}`"


def test_every_setting_is_documented_with_its_default(root: Path) -> None:
    documented = dict(ROW.findall(read(root, "reference/settings.md")))
    expected = {
        f"{ENV_PREFIX}{name}".upper(): written(field.default)
        for name, field in Settings.model_fields.items()
    }
    assert documented == expected


def visible_commands() -> dict[str, TyperCommand]:
    """Return each command that `muster --help` lists."""
    group = typer.main.get_command(build_app())
    assert isinstance(group, TyperGroup)
    return {
        name: command
        for name, command in group.commands.items()
        if isinstance(command, TyperCommand) and not command.hidden
    }


def test_every_command_and_option_is_documented(root: Path) -> None:
    reference = read(root, "reference/cli.md")
    sections = dict(
        re.findall(r"^### `muster (\w+)[^\n]*\n(.*?)(?=^##|\Z)", reference, re.M | re.S)
    )
    commands = visible_commands()
    assert set(sections) == set(commands)
    missing = [
        f"{name} {option}"
        for name, command in commands.items()
        for parameter in command.params
        if isinstance(parameter, TyperOption) and not parameter.hidden
        for option in parameter.opts
        if option not in {"--data-dir", "--help"} and f"`{option}`" not in sections[name]
    ]
    assert not missing


def test_every_key_of_an_agent_file_is_documented(root: Path) -> None:
    guide = read(root, "guides/first-agent.md") + read(root, "guides/tools.md")
    sources = (McpServer, OpenApiService, RemoteActivity, SqlDatabase)
    keys = {
        key
        for model in (AgentSpec, Limits, RetryPolicy, Sampling, ToolRef, *sources)
        for key in model.model_fields
    }
    assert {key for key in keys if not re.search(rf"\b{key}\b", guide)} == set()


def test_every_key_of_a_plan_file_is_documented(root: Path) -> None:
    guide = read(root, "guides/plans.md")
    nodes = (LLMNode, ToolNode, ApprovalNode, AgentNode, BranchNode, MapNode, JoinNode)
    keys = {key for model in (Plan, PlanLimits, Case, *nodes) for key in model.model_fields}
    assert {key for key in keys if not re.search(rf"\b{key}\b", guide)} == set()


def test_every_agent_in_the_documents_can_run(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = 0
    for document in documents(root):
        blocks = FENCE.findall(document.read_text())
        for name, text in NAMED.findall(document.read_text()):
            (tmp_path / name).write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        for language, text in blocks:
            if language == "yaml" and "\nnodes:" in text:
                plan = parse_plan(text, document.name)
                for each in plan.tools:
                    assert each.function
                    load_function(each.function, each.tool_name)
                found += 1
            elif language == "yaml" and "instructions:" in text:
                agent = parse_agent(text, str(tmp_path / document.name))
                for tool in agent.spec.tools:
                    if tool.function:
                        load_function(tool.function, tool.tool_name)
                found += 1
    assert found


def test_every_link_between_documents_leads_somewhere(root: Path) -> None:
    broken = [
        f"{document.relative_to(root)}: {target}"
        for document in documents(root)
        for target in LINK.findall(document.read_text())
        if not (document.parent / target).exists()
    ]
    assert not broken


def test_every_folder_stands_in_the_architecture(root: Path, packages: tuple[str, ...]) -> None:
    text = (root / "ARCHITECTURE.md").read_text()
    assert [name for name in packages if f"`{name}/`" not in text] == []


def test_every_dependency_stands_in_the_architecture_with_its_reason(root: Path) -> None:
    pyproject = (root / "pyproject.toml").read_text()
    text = (root / "ARCHITECTURE.md").read_text()
    names = set(re.findall(r'^    "([A-Za-z][\w.-]*)==', pyproject, re.MULTILINE))
    assert len(names) > 20
    missing = {
        name
        for name in names
        if not name.startswith("types-") and not re.search(rf"(?<![\w-]){re.escape(name)}\b", text)
    }
    assert not missing
