"""References in a plan: what is escaped comes back, what is filled in is the value itself."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflows.reference import (
    BadReferenceError,
    Reference,
    fill,
    fill_text,
    parse_text,
    schema_at,
    types_of,
)
from workflows.schema import misfit

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9_-]{0,5}", fullmatch=True)
KEYS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,5}", fullmatch=True)
REFERENCES = st.builds(
    Reference, NAMES, st.lists(KEYS | st.integers(0, 10**8), max_size=4).map(tuple)
)


@given(st.text(alphabet="$ {}ab.[0]\n") | st.text())
def test_text_that_was_escaped_is_filled_in_as_it_was(text: str) -> None:
    assert fill_text(text.replace("${", "$${"), {}) == text or "$$" in text


@given(REFERENCES)
def test_reference_that_was_written_is_read_as_it_was(reference: Reference) -> None:
    assert parse_text(str(reference)) == (reference,)
    assert parse_text(f"a {reference}b") == ("a ", reference, "b")


@given(JSON)
def test_reference_alone_stands_for_the_value_itself(value: Any) -> None:
    assert fill({"a": ["${n.x[1]}"]}, {"n": {"x": [0, value]}}) == {"a": [value]}


@given(JSON)
def test_value_without_references_stays_as_it_is(value: Any) -> None:
    def has_reference(part: Any) -> bool:
        return "${" in str(part)

    if not has_reference(value):
        assert fill(value, {}) == value


def test_values_among_words_are_text_or_json() -> None:
    scope: dict[str, Any] = {"a": "it", "b": {"c": [1, None, True]}}
    assert fill_text("${a}: ${b}, $5 $${a} ${b.c[1]}", scope) == (
        'it: {"c":[1,null,true]}, $5 ${a} null'
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("${", "a name is missing behind `${`"),
        ("${9}", "a name is missing behind `${`"),
        ("${a b}", "no `}` where the reference should end"),
        ("${a.}", "no `}` where the reference should end"),
        ("${a[-1]}", "no `}` where the reference should end"),
        ("${c}", "${c}: there is no 'c'"),
        ("${a.x.y}", "${a.x.y}: ${a.x} is not an object but array"),
        ("${a.z}", "${a.z}: ${a} has no 'z'"),
        ("${a.x[2]}", "${a.x[2]}: ${a.x} has 2 items"),
        ("${a[0]}", "${a[0]}: ${a} is not a list but object"),
    ],
)
def test_bad_reference_is_told(text: str, message: str) -> None:
    with pytest.raises(BadReferenceError) as caught:
        fill_text(text, {"a": {"x": [1, 2]}})
    assert caught.value.message.endswith(message)
    assert caught.value.hint


def at(schema: dict[str, Any], *steps: str | int) -> Any:
    return schema_at(schema, Reference("n", steps))


def test_schemas_are_followed_as_values_are() -> None:
    schema: dict[str, Any] = {
        "$defs": {"day": {"type": "object", "properties": {"high": {"type": "integer"}}}},
        "type": "object",
        "properties": {"days": {"type": "array", "items": {"$ref": "#/$defs/day"}}},
    }
    assert types_of(at(schema, "days", 3, "high")) == {"number"}
    assert types_of(at(schema, "days", 0)) == {"object"}
    with pytest.raises(BadReferenceError, match="is number, not an object"):
        at(schema, "days", 0, "high", "x")
    with pytest.raises(BadReferenceError, match="has no 'low'"):
        at(schema, "days", 0, "low")
    assert at({}, "anything", 3) == {}
    assert at({"anyOf": [{"type": "object"}, {"type": "null"}]}, "x") == {}
    assert types_of({"$ref": "#/nowhere"}) >= {"null", "object"}
    assert types_of({"$ref": "#"}) >= {"null", "object"}, "a schema that leads to itself"


@pytest.mark.parametrize(
    ("schema", "value", "problem"),
    [
        ({"type": "integer"}, 3, None),
        ({"type": "integer"}, 3.0, None),
        ({"type": "integer"}, 3.5, "it is not integer but number"),
        ({"type": "number"}, True, "it is not number but boolean"),
        ({"const": 1}, True, "it is not 1"),
        ({"enum": ["a", None]}, "b", "it is none of a, null"),
        ({"type": ["string", "null"]}, None, None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, 3, "it fits none of the ways"),
        ({"items": {"type": "string"}}, ["a", 3], "it[1] is not string but integer"),
        ({"required": ["a"]}, {}, "it lacks 'a'"),
        ({"properties": {"a": {"type": "null"}}}, {"a": 1}, "it.a is not null but integer"),
        ({"additionalProperties": False}, {"a": 1}, "it has 'a', which its schema does not know"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "null"}}}, 1, "it is not null but integer"),
        ({}, {"anything": [1]}, None),
    ],
)
def test_value_is_held_against_its_schema(schema: Any, value: Any, problem: str | None) -> None:
    found = misfit(schema, value)
    assert found == problem or (found is not None and problem and found.startswith(problem))


def test_schema_that_leads_back_to_itself_ends() -> None:
    value: Any = None
    for _ in range(200):
        value = [value]
    assert misfit({"items": {"$ref": "#"}}, value) is None
