"""What a tool takes: its arguments' model and JSON schema, from type hints and docstring.

The model of the arguments object has one field per parameter, under a name of our own with the
parameter's name as alias: a parameter may be called `schema` or `_x`, a pydantic field may not.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_type_hints

from docstring_parser import Docstring
from docstring_parser import parse as parse_docstring
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
    create_model,
)
from pydantic_core import PydanticSerializationError, to_json

from activities.tool import WrongArgumentsError
from contracts.error import BadInputError

IDEMPOTENCY_KEY = "idempotency_key"
"""A parameter of this name gets the tool call's id; the model never sees it."""

MAX_EXPECTED_CHARS = 1_500
"""How much of a schema an error text shows."""

MAX_PROBLEMS = 5
"""How many wrong arguments an error text lists."""

MAX_GOT_CHARS = 80
"""How much of a wrong value an error text shows."""


class Arguments:
    """The arguments of one tool: `schema` for the model, `validate` for what it sends."""

    def __init__(self, path: str, function: Callable[..., Any], documentation: Docstring) -> None:
        parameters = _parameters(path, function)
        key = parameters.pop(IDEMPOTENCY_KEY, None)
        if key is not None and key.annotation is not str:
            raise _bad(path, f"parameter {IDEMPOTENCY_KEY!r} must be annotated `str`")
        self.wants_idempotency_key = key is not None
        self._names = list(parameters)
        self._model = _model(path, parameters, documentation)
        self.schema = _schema(self._model)

    def validate(self, tool: str, arguments: Mapping[str, JsonValue]) -> dict[str, Any]:
        """Return keyword arguments, converted to their types; raises WrongArgumentsError."""
        try:
            model = self._model.model_validate(arguments)
        except ValidationError as error:
            raise WrongArgumentsError(self._explain(tool, error)) from None
        given = model.model_fields_set
        fields = ((name, f"p{place}") for place, name in enumerate(self._names))
        return {name: getattr(model, field) for name, field in fields if field in given}

    def _explain(self, tool: str, error: ValidationError) -> str:
        problems: list[str] = []
        for problem in error.errors(include_url=False, include_context=False)[:MAX_PROBLEMS]:
            where = ".".join(str(part) for part in problem["loc"]) or "arguments"
            got = "" if problem["type"] == "missing" else f" (got {_short(problem['input'])})"
            problems.append(f"{where}: {problem['msg']}{got}")
        expected = json.dumps(self.schema, ensure_ascii=False)[:MAX_EXPECTED_CHARS]
        return f"wrong arguments for tool {tool!r}: {'; '.join(problems)}. Expected: {expected}"


def _bad(path: str, problem: str, hint: str = "") -> BadInputError:
    return BadInputError(f"tool {path!r}: {problem}", hint=hint)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_GOT_CHARS else text[:MAX_GOT_CHARS] + "…"


def _parameters(path: str, function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters with their annotations resolved."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise _bad(path, f"has no signature that Python can read ({error})") from error
    target = function if inspect.isroutine(function) else type(function).__call__
    try:
        hints = get_type_hints(target, include_extras=True)
    except Exception as error:
        raise _bad(
            path,
            f"its type hints cannot be resolved: {error}",
            "names in type hints must be importable when the tool runs, not only for type checks",
        ) from error
    found: dict[str, inspect.Parameter] = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise _bad(path, f"takes `{parameter}`", "name each parameter and give it a type hint")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise _bad(path, f"parameter {name!r} is positional-only", "remove the `/`")
        if name not in hints:
            raise _bad(path, f"parameter {name!r} has no type hint", f"write `{name}: str`, say")
        found[name] = parameter.replace(annotation=hints[name])
    return found


def _model(
    path: str, parameters: Mapping[str, inspect.Parameter], documentation: Docstring
) -> type[BaseModel]:
    described = {param.arg_name: param.description for param in documentation.params}
    fields: dict[str, Any] = {}
    for place, (name, parameter) in enumerate(parameters.items()):
        _check_type(path, name, parameter.annotation)
        options: dict[str, Any] = {"alias": name}
        if (text := described.get(name)) and not _is_described(parameter.annotation):
            options["description"] = " ".join(text.split())
        if parameter.default is not inspect.Parameter.empty:
            _check_default(path, name, parameter)
            options["default"] = parameter.default
        fields[f"p{place}"] = (parameter.annotation, Field(**options))
    return create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)


def _check_type(path: str, name: str, annotation: Any) -> None:
    try:
        TypeAdapter(annotation).json_schema()
    except Exception as error:  # pydantic has many, and a type may have methods of its own
        shown = getattr(annotation, "__qualname__", None) or _short(annotation)
        raise _bad(
            path,
            f"parameter {name!r} has a type that JSON cannot carry: {shown}",
            "use str, int, float, bool, list, dict, Literal, a dataclass or a pydantic model",
        ) from error


def _is_described(annotation: Any) -> bool:
    return any(getattr(extra, "description", None) for extra in get_args(annotation)[1:])


def _check_default(path: str, name: str, parameter: inspect.Parameter) -> None:
    value = parameter.default
    hint = "the model is shown the default as JSON: use a plain value, or None"
    try:
        TypeAdapter(parameter.annotation).dump_json(value, warnings="error")
    except (PydanticSerializationError, PydanticUserError, ValueError, TypeError) as error:
        raise _bad(
            path, f"the default of parameter {name!r} is not JSON: {_short(value)}", hint
        ) from error
    if isinstance(value, float) and not math.isfinite(value):
        raise _bad(path, f"the default of parameter {name!r} is not JSON: {value!r}", hint)


def _schema(model: type[BaseModel]) -> dict[str, JsonValue]:
    schema = _without_titles(model.model_json_schema(by_alias=True))
    plain: dict[str, JsonValue] = json.loads(to_json(schema))
    plain.setdefault("properties", {})
    return plain


def _without_titles(schema: Any, *, is_names: bool = False) -> Any:
    """Drop pydantic's titles, which only repeat names; a property may be called `title`."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if is_names:
            kept[key] = _without_titles(value)
        elif key in ("default", "const", "enum", "examples"):
            kept[key] = value
        elif key != "title":
            kept[key] = _without_titles(value, is_names=key in ("properties", "$defs"))
    return kept


def documentation_of(function: Callable[..., Any]) -> Docstring:
    """Return the function's docstring, parsed (Google, NumPy, reST or epydoc style)."""
    return parse_docstring(inspect.getdoc(function) or "")
