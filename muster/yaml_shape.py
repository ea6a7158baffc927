"""Reads a YAML tree into the plain data that a pydantic model expects, by the model's own fields.

The fields decide what a scalar is, not YAML's guesses: where text is expected `no` and `2026-01-01`
stay text, where a duration is expected `1h30m` becomes one. Every value's line is kept, so that an
error found later, by the model's validators, can still name it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, Discriminator, JsonValue, Tag, ValidationError
from pydantic_core import ErrorDetails
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from muster.duration import MAX_DURATION, parse_duration
from muster.yaml_tree import FileValueError, KeyPath, Tree, is_null, kind, nearest, show_path

M = TypeVar("M", bound=BaseModel)

_INT = re.compile(r"[+-]?\d[\d_]*", re.ASCII)
_FLOAT = re.compile(r"[+-]?(\d[\d_]*)?\.?\d+([eE][+-]?\d+)?", re.ASCII)
_BOOL = {"true": True, "false": False}

Rewrite = Callable[[Tree, Node, KeyPath], Node | Mapping[str, Any] | None]
"""A short form of one model: returns its full form (a node or data), or None if it is not one."""


class Shape:
    """Reads trees into data for models; `short_forms` gives models a second way to be written."""

    def __init__(self, short_forms: Mapping[type[BaseModel], Rewrite]) -> None:
        self._short_forms = short_forms

    def read(self, model: type[BaseModel], tree: Tree) -> Mapping[str, Any]:
        """Return `tree` as data for `model`; raises `FileValueError` for the first wrong value."""
        return self._model(model, tree, tree.root, ())

    def _value(self, tree: Tree, node: Node, path: KeyPath, annotation: Any) -> Any:
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin is Annotated:
            kind_of_value = _member(tree, node, path, arguments) or arguments[0]
            return self._value(tree, node, path, kind_of_value)
        if origin in (Union, UnionType):
            if NoneType in arguments and is_null(node):
                return None
            kept = [each for each in arguments if each is not NoneType]
            if isinstance(node, MappingNode):  # `always`, say, or a mapping that says more
                kept.sort(key=lambda each: not _is_model(each))
            return self._value(tree, node, path, kept[0])
        if origin is tuple:
            items = tree.items(node, path, _example(arguments[0]))
            return [
                self._value(tree, item, (*path, index), arguments[0])
                for index, item in enumerate(items)
            ]
        if origin is dict and arguments[1] is not JsonValue:
            return {
                key: self._value(tree, value, (*path, key), arguments[1])
                for key, _, value in tree.entries(node, path)
            }
        if origin is dict or annotation is JsonValue:
            return _json(tree, node, path)
        if _is_model(annotation):
            return self._model(annotation, tree, node, path)
        return _scalar(tree, node, path, annotation)

    def _model(
        self, model: type[BaseModel], tree: Tree, node: Node, path: KeyPath
    ) -> Mapping[str, Any]:
        if model in self._short_forms:
            full = self._short_forms[model](tree, node, path)
            if isinstance(full, Mapping):
                return full
            node = full or node
        fields = model.model_fields
        data: dict[str, Any] = {}
        for key, key_node, value in tree.entries(node, path):
            if key not in fields:
                raise _unknown_key(tree, key_node, path, key, list(fields))
            data[key] = self._value(tree, value, (*path, key), fields[key].annotation)
        for key, info in fields.items():
            if key not in data and info.is_required():
                raise tree.error(
                    node, path, f"the key {key!r} is missing", hint=f"add a line `{key}: ...`"
                )
        return data


def _member(tree: Tree, node: Node, path: KeyPath, arguments: tuple[Any, ...]) -> Any:
    """Return which member of a union a mapping is by its keys, if the union tells them so."""
    found = [each for each in arguments[1:] if isinstance(each, Discriminator)]
    if not found or not isinstance(node, MappingNode):
        return None
    assert callable(found[0].discriminator)
    tag = found[0].discriminator({key: None for key, _, _ in tree.entries(node, path)})
    if tag is None:
        problem = found[0].custom_error_message or "cannot tell what this is"
        raise tree.error(node, path, problem, hint="the key says what it is")
    for member in get_args(arguments[0]):
        if any(isinstance(each, Tag) and each.tag == tag for each in get_args(member)[1:]):
            return member
    return None


def _is_model(annotation: Any) -> bool:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def build(model: type[M], data: Mapping[str, Any], tree: Tree) -> M:
    """Return the model of data that `Shape.read` read from `tree`, or raise with the line."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _model_error(tree, error.errors(include_url=False)[0]) from None


def _unknown_key(
    tree: Tree, node: Node, path: KeyPath, key: str, known: list[str]
) -> FileValueError:
    guess = nearest(key, known)
    keys = "the keys here are " + ", ".join(known)
    return tree.error(
        node,
        (*path, key),
        "no such key",
        hint=f"did you mean {guess!r}? {keys}" if guess else keys,
    )


def _scalar(tree: Tree, node: Node, path: KeyPath, kind_of_value: type) -> Any:
    if not isinstance(node, ScalarNode) or is_null(node):
        raise tree.error(
            node,
            path,
            f"expected {_expected(kind_of_value)}, got {kind(node)}",
            hint=_how_to_write(kind_of_value, node),
        )
    text = str(node.value)
    try:
        return _read_scalar(text, kind_of_value)
    except ValueError:
        hint = _how_to_write(kind_of_value, node)
        if issubclass(kind_of_value, Enum):
            guess = nearest(text, [str(each.value) for each in kind_of_value])
            hint = f"did you mean {guess!r}?" if guess else hint
        raise tree.error(
            node, path, f"expected {_expected(kind_of_value)}, got {text!r}", hint=hint
        ) from None


def _read_scalar(text: str, kind_of_value: type) -> Any:
    if issubclass(kind_of_value, Enum):
        return kind_of_value(text)
    if kind_of_value is timedelta:
        return parse_duration(text)
    if kind_of_value is bool:
        if text.lower() not in _BOOL:
            raise ValueError(text)
        return _BOOL[text.lower()]
    if kind_of_value is int:
        if not _INT.fullmatch(text) or len(text) > 30:
            raise ValueError(text)
        return int(text)
    if kind_of_value is float:
        if not _FLOAT.fullmatch(text):
            raise ValueError(text)
        return float(text)
    return text


def _expected(kind_of_value: type) -> str:
    if issubclass(kind_of_value, Enum):
        return " or ".join(repr(str(each.value)) for each in kind_of_value)
    names = {
        timedelta: "a duration",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
    }
    return names.get(kind_of_value, "text")


def _how_to_write(kind_of_value: type, node: Node) -> str:
    if kind_of_value is timedelta:
        return (
            "write it as 30s, 5m or 1h30m, or as a number of seconds; above 0 and at most "
            f"{MAX_DURATION.days} days"
        )
    if kind_of_value is str and isinstance(node, MappingNode):
        return "put text that contains `: ` or starts with `{` in quotes"
    if kind_of_value is str and isinstance(node, SequenceNode):
        return "put text that starts with `[` or `- ` in quotes"
    return f"write {_expected(kind_of_value)} after the `:`"


def _example(item: Any) -> str:
    if get_origin(item) is Annotated:
        item = get_args(item)[0]
    if isinstance(item, type) and issubclass(item, BaseModel):
        required = [key for key, info in item.model_fields.items() if info.is_required()]
        own = list(item.__annotations__)
        return f"{(required or own)[0]}: ..."
    return "name"


def _json(tree: Tree, node: Node, path: KeyPath) -> JsonValue:
    """Return any JSON value, by YAML 1.2's core rules for scalars."""
    if isinstance(node, MappingNode):
        return {key: _json(tree, value, (*path, key)) for key, _, value in tree.entries(node, path)}
    if isinstance(node, SequenceNode):
        items = tree.items(node, path, "value")
        return [_json(tree, item, (*path, index)) for index, item in enumerate(items)]
    text = str(node.value)
    if is_null(node):
        return None
    if getattr(node, "style", None) is not None:
        return text
    for kind_of_value in (bool, int, float):
        try:
            value: JsonValue = _read_scalar(text, kind_of_value)
        except ValueError:
            continue
        return value
    return text


def _model_error(tree: Tree, error: ErrorDetails) -> FileValueError:
    """Return what a model's own validators found, at the line of the value it speaks of."""
    path = tuple(part for part in error["loc"] if not str(part).startswith("<"))  # no union's tag
    limit = error.get("ctx", {})
    words = {
        "greater_than_equal": "expected at least {ge}",
        "greater_than": "expected more than {gt}",
        "less_than_equal": "expected at most {le}",
        "less_than": "expected less than {lt}",
        "string_too_short": "expected text, got nothing",
        "string_too_long": "expected at most {max_length} characters",
        "too_long": "expected at most {max_length} items, got {actual_length}",
        "too_short": "expected at least {min_length} items, got {actual_length}",
        "value_error": "{error}",
    }
    known = words.get(error["type"])
    problem = known.format(**limit) if known else error["msg"]
    hint = f"change {show_path(path)}, or leave it out"
    if error["type"] == "string_pattern_mismatch":
        problem, hint = _pattern_words(str(limit.get("pattern", "")))
    if error["type"] not in ("string_too_short", "too_long", "too_short", "value_error"):
        problem += f", got {_short(error['input'])}"
    return FileValueError(tree.file, tree.line(path), path, problem, hint=hint)


def _pattern_words(pattern: str) -> tuple[str, str]:
    if ":" in pattern:
        return "expected an import path", "name a function as `package.module:function`"
    if "\\s" in pattern:
        return "expected a person's name", "1 to 64 characters, no spaces, quotes, commas or `|`"
    rule = "a name starts with a letter, then letters, digits, `_` and `-`, at most 64 characters"
    return "expected a name", rule


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
