"""YAML text as a tree of nodes that know their lines, with everything surprising refused.

Only mappings with text keys, sequences and scalars come through: no aliases (a few lines of them
can stand for gigabytes), no tags, no duplicate keys, no second document, bounded depth. Scalars
keep their text as written, so that the reader of a value decides what it is: `name: no` is a name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

import yaml
from yaml.composer import ComposerError
from yaml.error import Mark
from yaml.events import AliasEvent, Event, NodeEvent
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from contracts.error import BadInputError

MAX_DEPTH = 24
"""Levels of nesting in a file: an agent needs about six."""

KeyPath = tuple[str | int, ...]
"""Where a value stands in a file: keys and positions, from the top."""


def show_path(path: KeyPath) -> str:
    """Return a path as people write it: `tools[0].retry.backoff`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            key = part if part.isprintable() and len(part) <= 60 else repr(part[:60])
            text += f".{key}" if text else key
    return text


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` is most likely a slip of, if any."""
    by_folded = {each.casefold().replace("-", "_"): each for each in known}
    close = difflib.get_close_matches(name.casefold().replace("-", "_"), by_folded, n=1, cutoff=0.6)
    return by_folded[close[0]] if close else None


class FileValueError(BadInputError):
    """A value in a file is wrong; `file`, `line` (from 1) and `path` say where."""

    def __init__(
        self, file: str, line: int | None, path: KeyPath, problem: str, *, hint: str
    ) -> None:
        where = f"{file}:{line}" if line else file
        key = f" {show_path(path)}:" if path else ""
        super().__init__(f"{where}:{key} {problem}", hint=hint)
        self.file, self.line, self.path, self.problem = file, line, path, problem


@dataclass(slots=True)
class Tree:
    """A parsed file: its root node, and the line of each path met while reading it."""

    file: str
    root: Node
    lines: dict[KeyPath, int] = field(default_factory=dict[KeyPath, int])

    def error(self, node: Node, path: KeyPath, problem: str, hint: str) -> FileValueError:
        """Return an error that points at `node`."""
        return FileValueError(self.file, line_of(node), path, problem, hint=hint)

    def line(self, path: KeyPath) -> int:
        """Return the line of `path`, or of its nearest known ancestor."""
        while path not in self.lines:
            if not path:
                return 1
            path = path[:-1]
        return self.lines[path]

    def entries(self, node: Node, path: KeyPath) -> list[tuple[str, Node, Node]]:
        """Return a mapping's (key, key node, value node); refuses duplicates and other keys."""
        if not isinstance(node, MappingNode):
            raise self.error(
                node,
                path,
                f"expected a mapping (`key: value`), got {kind(node)}",
                hint="indent the keys below it, one `key: value` a line",
            )
        seen: dict[str, int] = {}
        found: list[tuple[str, Node, Node]] = []
        for key_node, value in node.value:
            if not isinstance(key_node, ScalarNode):
                raise self.error(
                    key_node,
                    path,
                    f"expected a key, got {kind(key_node)}",
                    hint="keys are plain text",
                )
            key = str(key_node.value)
            if key in seen:
                raise self.error(
                    key_node,
                    (*path, key),
                    f"the key is already on line {seen[key]}",
                    hint="keep one of the two",
                )
            seen[key] = line_of(key_node)
            self.lines[(*path, key)] = seen[key]
            found.append((key, key_node, value))
        return found

    def items(self, node: Node, path: KeyPath, example: str) -> list[Node]:
        """Return a sequence's nodes; `example` is shown to who wrote something else."""
        if not isinstance(node, SequenceNode):
            raise self.error(
                node,
                path,
                f"expected a list, got {kind(node)}",
                hint=f"write one item a line, such as `- {example}`",
            )
        for index, item in enumerate(node.value):
            self.lines[(*path, index)] = line_of(item)
        return list(node.value)


def parse_tree(text: str, file: str) -> Tree:
    """Return the tree of YAML `text`; raises `FileValueError` with the line of what is wrong."""
    try:
        root = _PlainLoader(file, text).get_single_node()
    except ComposerError as error:
        mark: Mark | None = error.problem_mark
        raise FileValueError(
            file,
            mark.line + 1 if mark else None,
            (),
            "a second YAML document starts here",
            hint="keep one agent in a file; remove the `---` line",
        ) from None
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(file, error) from None
    except yaml.reader.ReaderError as error:
        at = error.position
        line = text.count("\n", 0, at) + 1
        raise FileValueError(
            file,
            line,
            (),
            f"the character {text[at : at + 1]!r} is not allowed in YAML",
            hint="agent files are plain UTF-8 text; remove it",
        ) from None
    if root is None:
        raise FileValueError(
            file,
            None,
            (),
            "the file is empty",
            hint="an agent needs at least `name` and `instructions`",
        )
    return Tree(file, root, {(): line_of(root)})


def line_of(node: Node) -> int:
    """Return the line (from 1) on which a node starts."""
    return node.start_mark.line + 1


def is_null(node: Node) -> bool:
    """Return whether a node is YAML's nothing: an empty value, `~` or a bare `null`."""
    return isinstance(node, ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def kind(node: Node) -> str:
    """Return what a node is, in words, with a scalar's text."""
    if isinstance(node, MappingNode):
        return "a mapping"
    if isinstance(node, SequenceNode):
        return "a list"
    if is_null(node):
        return "nothing"
    text = str(node.value)
    return repr(text if len(text) <= 60 else text[:57] + "...")


class _PlainLoader(yaml.SafeLoader):
    """PyYAML's loader up to its nodes, without aliases and tags, to a bounded depth."""

    def __init__(self, file: str, text: str) -> None:
        super().__init__(text)
        self._file = file
        self._depth = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        event: Event = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, AliasEvent):
            raise FileValueError(
                self._file,
                line,
                (),
                f"alias *{event.anchor} is not allowed here",
                hint="write the value out where it is used",
            )
        tag = getattr(event, "tag", None) if isinstance(event, NodeEvent) else None
        if tag is not None:
            raise FileValueError(
                self._file,
                line,
                (),
                f"tag {tag!r} is not allowed here",
                hint="write plain values; put text that starts with `!` in quotes",
            )
        if self._depth >= MAX_DEPTH:
            raise FileValueError(
                self._file,
                line,
                (),
                f"nested deeper than {MAX_DEPTH} levels",
                hint="an agent file needs only a few levels",
            )
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


def _syntax_error(file: str, error: yaml.MarkedYAMLError) -> FileValueError:
    mark: Mark | None = error.problem_mark or error.context_mark
    problem = error.problem or error.context or "cannot be read"
    hint = "check the indentation and quotes on this line and the one before"
    if "'\\t'" in problem:
        problem, hint = "a tab stands where YAML wants spaces", "indent with spaces"
    elif "mapping values are not allowed" in problem:
        problem = "a second `:` on one line"
        hint = "put text that contains `: ` in quotes"
    return FileValueError(
        file, mark.line + 1 if mark else None, (), f"not YAML: {problem}", hint=hint
    )
