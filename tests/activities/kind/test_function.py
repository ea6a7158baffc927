"""A plain function becomes a tool, or one clear error that says what to change."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from activities.kind.function import FunctionTool, load_function
from activities.tool import WrongArgumentsError
from contracts.error import BadInputError
from tests.activities.good_tool import Place, Unit

GOOD, BAD = "tests.activities.good_tool", "tests.activities.bad_tool"


def _load(function: str, module: str = GOOD) -> FunctionTool:
    return load_function(f"{module}:{function}", function)


def test_schema_comes_from_type_hints_and_docstring() -> None:
    schema = _load("forecast").schema
    assert schema.name == "forecast"
    assert schema.description == "Say tomorrow's weather. Uses the climate of the place."
    properties: Any = schema.arguments["properties"]
    assert schema.arguments["required"] == ["place", "day"]
    assert schema.arguments["additionalProperties"] is False
    assert properties["day"] == {
        "description": "Which day, as a date.",
        "format": "date",
        "type": "string",
    }
    assert properties["detail"] == {
        "default": "short",
        "enum": ["short", "long"],
        "type": "string",
    }
    assert properties["schema"]["default"] is None
    assert "title" not in str(schema.arguments)


def test_name_given_by_the_agent_wins() -> None:
    tool = load_function(f"{GOOD}:shout", "loud")
    assert tool.schema.name == "loud"
    assert tool.is_async
    properties: Any = tool.schema.arguments["properties"]
    assert properties["text"]["description"] == "What to shout"


def test_idempotency_key_is_not_shown_to_the_model() -> None:
    tool = _load("pay")
    assert tool.arguments.wants_idempotency_key
    assert list(tool.schema.arguments["properties"]) == ["amount"]  # type: ignore[arg-type]


def test_function_without_parameters_takes_an_empty_object() -> None:
    assert _load("nothing").schema.arguments == {
        "additionalProperties": False,
        "properties": {},
        "type": "object",
    }


def test_callable_object_is_a_tool() -> None:
    tool = _load("greet")
    assert list(tool.schema.arguments["properties"]) == ["name"]  # type: ignore[arg-type]


def test_arguments_are_converted_to_the_types_of_the_function() -> None:
    arguments = _load("forecast").arguments.validate(
        "forecast", {"place": {"city": "Porto"}, "day": "2026-11-30", "unit": "fahrenheit"}
    )
    assert arguments == {
        "place": Place("Porto"),
        "day": date(2026, 11, 30),
        "unit": Unit.FAHRENHEIT,
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, ["place: Field required", "day: Field required"]),
        ({"place": {"city": "Porto"}, "day": "soon"}, ["day: ", "(got 'soon')"]),
        ({"place": {}, "day": "2026-11-30"}, ["place.city: Field required"]),
        (
            {"place": {"city": "P"}, "day": "2026-11-30", "daze": 1},
            ["daze: Extra inputs are not permitted"],
        ),
        ({"place": {"city": "P"}, "day": "x" * 10_000}, ["(got 'xxxx"]),
    ],
)
def test_wrong_arguments_say_what_was_expected(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(WrongArgumentsError) as caught:
        _load("forecast").arguments.validate("forecast", arguments)
    text = str(caught.value)
    assert text.startswith("wrong arguments for tool 'forecast': ")
    assert "Expected: {" in text
    assert all(word in text for word in words)
    assert len(text) < 3_000


@pytest.mark.parametrize(
    ("path", "message", "hint"),
    [
        ("no_such_package.tool:f", "there is no module 'no_such_package'", "MUSTER_TOOL_PATH"),
        ("tests.activities.nowhere:f", "there is no module 'tests.activities.nowhere'", ""),
        (f"{GOOD}:frcast", "has no 'frcast'", "it has: forecast, "),
        (f"{BAD}:not_callable", "is not a function but of type int", "name a function"),
        (f"{BAD}:Opaque", "is not a function but the class Opaque", "name a function"),
        (f"{BAD}:no_hint", "parameter 'x' has no type hint", "write `x: str`"),
        (f"{BAD}:star", "takes `*names", "name each parameter"),
        (f"{BAD}:double_star", "takes `**names", "name each parameter"),
        (f"{BAD}:positional", "'x' is positional-only", "remove"),
        (
            f"{BAD}:opaque",
            "parameter 'x' has a type that JSON cannot carry: Opaque",
            "use str, int",
        ),
        (f"{BAD}:bad_default", "the default of parameter 'x' is not JSON: <", "plain value"),
        (f"{BAD}:nan_default", "the default of parameter 'x' is not JSON: nan", "plain value"),
        (f"{BAD}:refuses_schema", "'x' has a type that JSON cannot carry: _RefusesSchema", ""),
        (f"{BAD}:function_argument", "parameter 'x' has a type that JSON cannot carry: ", ""),
        (f"{BAD}:unresolved", "type hints cannot be resolved", "importable"),
        (f"{BAD}:key_of_wrong_type", "must be annotated `str`", ""),
        (f"{BAD}:generator", "is a generator function", "return a list"),
        ("tests.activities.broken_module:f", "RuntimeError: needs a licence", "traceback"),
        ("store.context:ContextStore", "'store' is taken by this program", "rename"),
        ("math:hypot", "", ""),
    ],
)
def test_tool_that_cannot_be_used_is_one_clear_error(path: str, message: str, hint: str) -> None:
    with pytest.raises(BadInputError) as caught:
        load_function(path, path.rpartition(":")[2])
    assert path in caught.value.message
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert "\n" not in caught.value.message
