"""A plan's YAML file: read it, check it, and say in one line what is wrong and where.

Tools and agents have the short forms that they have in an agent's file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from contracts.agent import AgentSpec, SubAgent, ToolRef
from contracts.plan import Plan
from muster.agent_file import (
    AgentFile,
    SubAgentReader,
    check_file,
    load_agent,
    read_text,
    tool_by_path,
)
from muster.yaml_shape import Shape, build
from muster.yaml_tree import FileValueError, Tree, parse_tree
from workflows.plan_agent import tool_agent
from workflows.plan_check import check_plan
from workflows.plan_place import PlanError


def load_file(path: Path, tool_path: Sequence[Path]) -> AgentSpec | Plan:
    """Read the file of an agent, or of a plan, which has `nodes`; check all that can be now.

    Raises `BadInputError`, or `FileValueError` (one, with the line) for what stands in the file.
    `tool_path` are the directories that a tool worker adds to its import path.
    """
    text = read_text(path)
    tree = parse_tree(text, str(path))
    if not any(key == "nodes" for key, _, _ in tree.entries(tree.root, ())):
        return load_agent(path, tool_path)
    plan, agents = _read(tree, path)
    check_file(AgentFile(str(path), tool_agent(plan), tree, agents), tool_path)
    return plan


def parse_plan(text: str, file: str) -> Plan:
    """Return the plan that YAML `text` declares, checked; its tools are not imported."""
    return _read(parse_tree(text, file), Path(file))[0]


def _read(tree: Tree, path: Path) -> tuple[Plan, tuple[AgentFile, ...]]:
    reader = SubAgentReader((path,))
    shape = Shape({ToolRef: tool_by_path, SubAgent: reader.by_file})
    plan = build(Plan, shape.read(Plan, tree), tree)
    try:
        check_plan(plan)
    except PlanError as error:
        line = tree.line(error.path)
        raise FileValueError(str(path), line, (), error.message, hint=error.hint) from None
    return plan, tuple(reader.found)
