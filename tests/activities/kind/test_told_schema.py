"""Of a stranger's schema the model is held to what a grammar keeps, and to no more than it says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from activities.kind.told_schema import MAX_DEPTH, told_schema
from contracts.error import BadInputError

VALUES: list[Any] = [None, True, 3, 2.5, "a", "", [], [1, "a"], {}, {"a": 1}, {"a": {"a": {}}}]


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def test_words_that_a_grammar_cannot_keep_are_left_out() -> None:
    schema = _object(
        when={"type": "string", "format": "date-time", "pattern": "^2", "description": "When."},
        sizes={"type": "array", "uniqueItems": True, "items": {"type": "integer", "multipleOf": 5}},
        count={"type": "integer", "minimum": 1, "maximum": 10**30},
        text={"type": "string", "minLength": 1, "maxLength": 1_000_000},
    )
    assert told_schema("do", schema)["properties"] == {
        "when": {"type": "string", "description": "When."},
        "sizes": {"type": "array", "items": {"type": "integer"}},
        "count": {"type": "integer", "minimum": 1},
        "text": {"type": "string", "minLength": 1},
    }


def test_what_references_lead_to_stands_in_defs() -> None:
    schema = _object(
        a={"$ref": "#/definitions/x%20y"}, b={"$ref": "#/properties/c"}, c={"type": "string"}
    ) | {"definitions": {"x y": {"type": "array", "items": {"$ref": "#"}}}}
    told = told_schema("do", schema)
    definitions = told["$defs"]
    first = told["properties"]["a"]["$ref"].removeprefix("#/$defs/")
    again = definitions[first]["items"]["$ref"].removeprefix("#/$defs/")
    assert definitions[first]["type"] == "array"
    assert definitions[again]["properties"].keys() == {"a", "b", "c"}
    assert Draft202012Validator(told).is_valid({"a": [{"b": "x"}], "b": "x"})
    assert not Draft202012Validator(told).is_valid({"a": [{"b": 1}]})


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("#/$defs/none", "leads nowhere"),
        ("other.json", "leads out of it"),
        ("http://127.0.0.1:9/x", "leads out of it"),
        ("#anchor", "leads out of it"),
        ("#/$defs/loop", "leads back to itself"),
        ("#/$defs/choice", "leads back to itself"),
    ],
)
def test_reference_that_leads_nowhere_is_one_clear_error(reference: str, said: str) -> None:
    schema = _object(a={"type": "array", "items": {"$ref": reference}})
    choice = {"oneOf": [{"type": "string"}, {"$ref": "#/$defs/choice"}]}
    schema["$defs"] = {"loop": {"$ref": "#/$defs/loop"}, "choice": choice}
    with pytest.raises(BadInputError, match=said) as caught:
        told_schema("do", schema)
    assert repr(reference) in caught.value.message
    assert "tool 'do'" in caught.value.message


def test_free_object_may_hold_anything_and_one_without_arguments_nothing() -> None:
    assert told_schema("do", {"type": "object"}) == {"type": "object", "properties": {}}
    told = told_schema("do", _object(filter={"type": "object"}))
    assert told["properties"]["filter"] == {"type": "object", "additionalProperties": True}


def test_required_argument_that_is_not_described_may_be_anything() -> None:
    told = told_schema("do", {"type": "object", "required": ["a"]})
    assert told["properties"] == {"a": {}}
    assert told["required"] == ["a"]


def test_what_is_too_deep_may_be_anything() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(MAX_DEPTH + 5):
        schema = _object(a=schema)
    told = json.dumps(told_schema("do", schema))
    assert told.count('"properties"') == MAX_DEPTH + 1
    assert "string" not in told


_schemas = st.recursive(
    st.sampled_from(
        [
            {},
            True,
            {"type": "string", "pattern": "^a", "maxLength": 3},
            {"type": ["integer", "null"], "minimum": 2},
            {"enum": [1, "a", {"a": 1}]},
            {"const": "a"},
            {"$ref": "#/$defs/x"},
            {"not": {"type": "string"}},
        ]
    ),
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object")},
            optional={
                "properties": st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
                "required": st.just(["a"]),
                "additionalProperties": st.one_of(st.booleans(), inner),
            },
        ),
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": inner}, optional={"uniqueItems": st.just(True)}
        ),
        st.builds(
            lambda key, parts: {key: parts},
            st.sampled_from(["anyOf", "oneOf", "allOf"]),
            st.lists(inner, min_size=1, max_size=2),
        ),
    ),
    max_leaves=6,
)


@given(_schemas, _schemas)
def test_whatever_the_whole_schema_allows_the_model_may_write(inner: Any, other: Any) -> None:
    schema = _object(a=inner) | {"$defs": {"x": {"type": "array", "items": other}}}
    whole = Draft202012Validator(schema)
    told = Draft202012Validator(told_schema("do", schema))
    Draft202012Validator.check_schema(told.schema)
    for value in VALUES:
        if whole.is_valid({"a": value}):
            assert told.is_valid({"a": value}), told.schema
