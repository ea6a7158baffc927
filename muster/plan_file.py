"""A plan's YAML file: read it, check it, and say in one line what is wrong and where.

Tools and agents have the short forms that they have in an agent's file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import JsonValue

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
from workflows.plan_type import check_arguments


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
    with _told_with_lines(tree):
        check_arguments(plan, _schemas(plan))
    return plan


def _schemas(plan: Plan) -> dict[str, Mapping[str, JsonValue]]:
    """Return the schemas of the arguments of those tools whose functions were imported."""
    from activities.kind.function import load_function

    return {
        tool.tool_name: load_function(tool.function, tool.tool_name).schema.arguments
        for tool in plan.tools
        if tool.function
    }


@contextmanager
def _told_with_lines(tree: Tree) -> Iterator[None]:
    """Let what is wrong with a plan say in which line of its file that stands."""
    try:
        yield
    except PlanError as error:
        line = tree.line(error.path)
        raise FileValueError(tree.file, line, (), error.message, hint=error.hint) from None


def parse_plan(text: str, file: str) -> Plan:
    """Return the plan that YAML `text` declares, checked; its tools are not imported."""
    return _read(parse_tree(text, file), Path(file))[0]


def _read(tree: Tree, path: Path) -> tuple[Plan, tuple[AgentFile, ...]]:
    reader = SubAgentReader((path,))
    shape = Shape({ToolRef: tool_by_path, SubAgent: reader.by_file})
    plan = build(Plan, shape.read(Plan, tree), tree)
    with _told_with_lines(tree):
        check_plan(plan)
    return plan, tuple(reader.found)
