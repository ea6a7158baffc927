"""An agent's YAML file: read it, check it, and say in one line what is wrong and where.

Beside the fields of `AgentSpec` a file may use short forms: a tool is its import path alone, an
example is `user: text` (or `assistant:`, `system:`, `tool:`), a duration is `30s`, `5m`, `1h30m` or
a number of seconds. A sub-agent is a file of its own: `file: other.yaml`, seen from this one.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from yaml.nodes import MappingNode, Node, ScalarNode

from contracts.agent import AgentSpec, SubAgent, ToolRef
from contracts.error import BadInputError, LimitExceededError
from contracts.limit import MAX_AGENT_DEPTH, MAX_AGENT_FILE_BYTES
from contracts.message import Message, Role
from muster.yaml_shape import Shape, build
from muster.yaml_tree import FileValueError, KeyPath, Tree, nearest, parse_tree


@dataclass(frozen=True, slots=True)
class AgentFile:
    """A file that was read: the agent it declares, and where each of its parts stands."""

    file: str
    spec: AgentSpec
    tree: Tree
    agents: tuple[AgentFile, ...] = ()
    """Those of its sub-agents, in their order."""

    def at(self, path: KeyPath, error: BadInputError) -> FileValueError:
        """Return `error` with the file, the line and the key that it is about."""
        return FileValueError(self.file, self.tree.line(path), path, error.message, hint=error.hint)


def read_agent_file(path: Path) -> AgentFile:
    """Read and check an agent's file; its tools are not imported.

    Raises `BadInputError`, or `FileValueError` (one, with the line) for what stands in the file.
    """
    return parse_agent(read_text(path), str(path))


def load_agent(path: Path, tool_path: Sequence[Path]) -> AgentSpec:
    """Read an agent's file and import its tools, to find now what would fail in the job.

    `tool_path` are the directories that a tool worker adds to its import path. What modules print
    while they are imported goes to standard error.
    """
    agent = read_agent_file(path)
    check_file(agent, tool_path)
    return agent.spec


def check_file(agent: AgentFile, tool_path: Sequence[Path]) -> None:
    """Check the tools and rules of an agent and its sub-agents; raises `FileValueError`."""
    for each in _with_sub_agents(agent):
        _check_rules(each)
        if each.spec.tools:
            check_tools(each, tool_path)


def check_tools(agent: AgentFile, tool_path: Sequence[Path]) -> None:
    """Import the functions that are tools of `agent`; servers are asked when a job opens.

    Raises `FileValueError` at the first that cannot be used.
    """
    from activities.kind.function import load_function

    for directory in map(str, tool_path):
        if directory not in sys.path:
            sys.path.append(directory)
    for index, tool in enumerate(agent.spec.tools):
        if tool.function is None:
            continue
        try:
            with contextlib.redirect_stdout(sys.stderr):
                load_function(tool.function, tool.tool_name)
        except BadInputError as error:
            raise agent.at(("tools", index, "function"), error) from error


def _check_rules(agent: AgentFile) -> None:
    """Check by what rules calls need approval; raises `FileValueError`."""
    found: list[tuple[KeyPath, ToolRef | SubAgent]] = []
    found += [(("tools", index), each) for index, each in enumerate(agent.spec.tools)]
    found += [(("agents", index), each) for index, each in enumerate(agent.spec.agents)]
    for place, each in found:
        if each.approval_policy is None or each.approval_policy.when is None:
            continue
        from activities.approval import check_rule

        try:
            check_rule(each.tool_name, each.approval_policy.when)
        except BadInputError as error:
            raise agent.at((*place, "approval", "when"), error) from error


def _with_sub_agents(agent: AgentFile) -> Iterator[AgentFile]:
    yield agent
    for each in agent.agents:
        yield from _with_sub_agents(each)


def parse_agent(text: str, file: str, *, callers: tuple[Path, ...] = ()) -> AgentFile:
    """Return the agent that YAML `text` declares; `file` names it in errors.

    `callers` are the files of the agents that call this one, the outermost first.
    """
    tree = parse_tree(text, file)
    reader = SubAgentReader((*callers, Path(file)))
    shape = Shape({ToolRef: tool_by_path, Message: _message_by_role, SubAgent: reader.by_file})
    data = shape.read(AgentSpec, tree)
    _check_names(tree, data)
    _name_tool_messages(tree, data)
    spec = build(AgentSpec, data, tree)
    _check_order(tree, spec)
    return AgentFile(file, spec, tree, tuple(reader.found))


class SubAgentReader:
    """Puts the agent of another file where a sub-agent names one."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self._files = files
        self.found: list[AgentFile] = []

    def by_file(self, tree: Tree, node: Node, path: KeyPath) -> Node:
        """Return a sub-agent's node with the other file's agent as its `agent`."""
        entries = {key: value for key, _, value in tree.entries(node, path)}
        named = entries.get("file")
        if not isinstance(named, ScalarNode) or not named.value:
            raise tree.error(
                named or node,
                (*path, "file"),
                "expected the file of the sub-agent",
                hint="add a line `file: other.yaml`; it is looked for beside this file",
            )
        agent = self._read(tree, named, (*path, "file"))
        self.found.append(agent)
        assert isinstance(node, MappingNode)
        kept = [pair for pair in node.value if pair[1] is not named]
        if "name" not in entries:
            kept.append((_text("name", node), _text(agent.spec.name, node)))
        node.value[:] = [*kept, (_text("agent", node), agent.tree.root)]
        return node

    def _read(self, tree: Tree, named: ScalarNode, path: KeyPath) -> AgentFile:
        own = self._files[-1]
        file = own.parent / str(named.value)
        files = [*map(Path.resolve, self._files), file.resolve()]
        if files[-1] in files[:-1]:
            raise tree.error(
                named,
                path,
                f"agents call each other: {' <- '.join(each.name for each in reversed(files))}",
                hint="an agent cannot call one that calls it",
            )
        if len(files) > MAX_AGENT_DEPTH:
            raise tree.error(
                named,
                path,
                f"agents call agents {len(files)} levels deep, the limit is {MAX_AGENT_DEPTH}",
                hint="let an agent higher up call this one",
            )
        try:
            text = read_text(file)
        except FileValueError:
            raise
        except BadInputError as error:
            raise tree.error(named, path, error.message, hint=error.hint) from None
        return parse_agent(text, str(file), callers=self._files)


def _text(text: str, near: Node) -> ScalarNode:
    return ScalarNode("tag:yaml.org,2002:str", text, near.start_mark, near.end_mark)


def read_text(path: Path) -> str:
    """Return the text of an agent's or a plan's file; raises BadInputError."""
    try:
        state = path.stat()
        if stat.S_ISDIR(state.st_mode):
            raise BadInputError(
                f"{path} is a directory, not an agent file", hint=_files_in(path, "name one of")
            )
        if not stat.S_ISREG(state.st_mode):
            raise BadInputError(f"{path} is not a regular file", hint="name a YAML file")
        with path.open("rb") as stream:
            raw = stream.read(MAX_AGENT_FILE_BYTES + 1)
    except FileNotFoundError:
        raise BadInputError(f"no agent file {str(path)!r}", hint=_where_else(path)) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadInputError(
            f"agent file {str(path)!r} cannot be read: {reason}", hint="check its path and rights"
        ) from None
    if len(raw) > MAX_AGENT_FILE_BYTES:
        raise LimitExceededError(
            f"agent file {str(path)!r}",
            max(state.st_size, len(raw)),
            MAX_AGENT_FILE_BYTES,
            "bytes",
            hint="keep documents outside the agent file and read them with a tool",
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise FileValueError(
            str(path),
            line,
            (),
            f"byte 0x{raw[error.start]:02x} is not UTF-8 text",
            hint="save the file as UTF-8",
        ) from None


def _where_else(path: Path) -> str:
    names = _yaml_names(path.parent)
    guess = nearest(path.name, names)
    if guess:
        return f"did you mean {path.parent / guess}?"
    if not path.parent.is_dir():
        return f"there is no directory {str(path.parent)!r} either, seen from {Path.cwd()}"
    return _files_in(path.parent, "there are")


def _files_in(directory: Path, words: str) -> str:
    names = _yaml_names(directory)
    if not names:
        return f"{str(directory)!r} holds no .yaml file"
    more = ", ..." if len(names) > 5 else ""
    return f"{words} {', '.join(str(directory / name) for name in names[:5])}{more}"


def _yaml_names(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return sorted(each.name for each in entries if each.name.endswith((".yaml", ".yml")))
    except OSError:
        return []


def tool_by_path(tree: Tree, node: Node, path: KeyPath) -> Mapping[str, Any] | None:
    """Return a tool that is its import path alone."""
    if isinstance(node, ScalarNode) and node.value:
        tree.lines[(*path, "function")] = tree.line(path)
        return {"function": str(node.value)}
    return None


def _message_by_role(tree: Tree, node: Node, path: KeyPath) -> Mapping[str, Any] | None:
    if not isinstance(node, MappingNode) or len(node.value) != 1:
        return None
    [(key, key_node, value)] = tree.entries(node, path)
    roles = [str(role) for role in Role]
    if key not in roles:
        if (guess := nearest(key, roles)) is None:
            return None
        raise tree.error(
            key_node,
            (*path, key),
            "no such key",
            hint=f"did you mean {guess!r}? a message is {', '.join(roles)} and its text",
        )
    if not isinstance(value, ScalarNode) or not value.value:
        raise tree.error(
            value,
            (*path, key),
            "expected the message's text",
            hint=f"write `- {key}: text`; put text that starts with `{{` or `[` in quotes",
        )
    return {"role": key, "content": str(value.value)}


def _check_names(tree: Tree, data: Mapping[str, Any]) -> None:
    """Refuse a tool named twice and a name in `after` or `answer_after` that no tool has.

    A server's tools are known only when a job opens, which checks their names then.
    """
    names: dict[str, KeyPath] = {}
    callables = [(path, each, _name_of(each)) for path, each in _callables(data)]
    for path, _, named in callables:
        if named is None:
            continue
        name, key = named
        if name in names:
            raise _at(
                tree,
                (*path, key),
                f"a tool is already named {name!r} on line {tree.line(names[name])}",
                "give one of them another `name`",
            )
        names[name] = (*path, key)
    if any(named is None for _, _, named in callables):
        return
    for path, each, named in callables:
        others = [name for name in names if named is None or name != named[0]]
        _check_known(tree, (*path, "after"), each.get("after", []), others)
    _check_known(tree, ("answer_after",), data.get("answer_after", []), list(names))


def _callables(data: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Mapping[str, Any]]]:
    """Yield each tool and sub-agent with its path."""
    for key in ("tools", "agents"):
        for index, each in enumerate(data.get(key, [])):
            yield (key, index), each


def _name_of(each: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what the model calls a tool or sub-agent, and the key that says so.

    None for a server without `remote`, whose tools are not known yet.
    """
    if ("mcp" in each or "openapi" in each) and not each.get("remote"):
        return None
    if each.get("name"):
        return str(each["name"]), "name"
    if each.get("function"):
        return str(each["function"]).rpartition(":")[2], "function"
    if each.get("activity"):
        return str(each["activity"]["type"]), "activity"
    return (str(each["remote"]), "remote") if each.get("remote") else ("sql", "sql")


def _name_tool_messages(tree: Tree, data: Mapping[str, Any]) -> None:
    """Give a tool's example message the tool that the message before it calls, if it names none."""
    before: Mapping[str, Any] = {}
    for index, message in enumerate(data.get("examples", [])):
        if message["role"] == Role.TOOL and message.get("tool") is None:
            message["tool"] = _called_tool(before)
            if message["tool"] is None:
                raise _at(
                    tree,
                    ("examples", index),
                    "a tool's message does not say which tool",
                    "write it as `role: tool`, `tool: NAME` and `content: text`",
                )
        before = message


def _called_tool(message: Mapping[str, Any]) -> str | None:
    """Return the tool that an example message calls, by its `tool_calls` or by its JSON text."""
    if calls := message.get("tool_calls"):
        return str(calls[0]["tool"]) if len(calls) == 1 else None
    try:
        called = json.loads(message.get("content", ""))
    except ValueError:
        return None
    name = called.get("tool") if isinstance(called, dict) else None
    return name if isinstance(name, str) else None


def _check_known(tree: Tree, path: KeyPath, names: list[str], known: list[str]) -> None:
    for index, name in enumerate(names):
        if name not in known:
            guess = nearest(name, known)
            there = f"the tools are {', '.join(known)}" if known else "this agent has no such tools"
            raise _at(
                tree,
                (*path, index),
                f"{name!r} is not another tool of this agent",
                f"did you mean {guess!r}? {there}" if guess else there,
            )


def _check_order(tree: Tree, spec: AgentSpec) -> None:
    """Refuse tools that wait for each other: none of them could ever be offered."""
    sorter = TopologicalSorter({each.tool_name: each.after for each in spec.callables})
    try:
        sorter.prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        paths = [("tools", i) for i in range(len(spec.tools))]
        paths += [("agents", i) for i in range(len(spec.agents))]
        index = next(i for i, each in enumerate(spec.callables) if each.tool_name == circle[0])
        raise _at(
            tree,
            (*paths[index], "after"),
            f"tools wait for each other: {' <- '.join(circle)}",
            "take one of these names out of `after`",
        ) from None


def _at(tree: Tree, path: KeyPath, problem: str, hint: str) -> FileValueError:
    return FileValueError(tree.file, tree.line(path), path, problem, hint=hint)
