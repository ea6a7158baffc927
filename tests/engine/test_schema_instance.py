"""The simulated engine's default structured answers."""

from __future__ import annotations

import random
from typing import Any

import jsonschema
import pytest

from inference_service.engine.protocol import EngineRequestError
from inference_service.engine.schema_instance import make_instance

SCHEMAS: list[dict[str, Any]] = [
    {"const": {"a": [1, None]}},
    {"enum": ["red", 2, None]},
    {"type": ["null", "string"]},
    {"type": "boolean"},
    {"type": "string", "minLength": 40},
    {"type": "string", "maxLength": 2},
    {"type": "string", "format": "date"},
    {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"},
    {"type": "integer"},
    {"type": "integer", "minimum": 7, "maximum": 9},
    {"type": "integer", "exclusiveMinimum": 3},
    {"type": "integer", "maximum": -5},
    {"type": "integer", "exclusiveMaximum": 0},
    {"type": "integer", "minimum": 1, "multipleOf": 5},
    {"type": "number", "minimum": 0.25, "maximum": 0.5},
    {"type": "number", "exclusiveMaximum": 0.0},
    {"type": "array", "items": {"type": "integer"}, "minItems": 3},
    {"type": "array", "prefixItems": [{"const": 1}, {"type": "string"}], "items": False},
    {"anyOf": [{"type": "integer"}, {"type": "object", "required": ["x"]}]},
    {"oneOf": [{"const": 1}, {"const": 2}]},
    {
        "allOf": [
            {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "string"}}, "required": ["b"]},
        ]
    },
    {
        "type": "object",
        "properties": {
            "head": {"$ref": "#/$defs/node"},
            "note": {"type": "string"},
        },
        "required": ["head"],
        "additionalProperties": False,
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "number"},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["value", "next"],
            }
        },
    },
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: str(schema)[:60])
def test_instance_is_valid(schema: dict[str, Any]) -> None:
    for seed in range(10):
        instance = make_instance(schema, random.Random(seed))
        jsonschema.validate(instance, schema, jsonschema.Draft202012Validator)


def test_same_seed_makes_the_same_instance() -> None:
    schema = {"anyOf": [{"enum": list(range(100))}, {"type": "string"}]}
    assert make_instance(schema, random.Random(5)) == make_instance(schema, random.Random(5))


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "nonsense"}, "unknown type 'nonsense'"),
        ({"$ref": "#/$defs/none"}, "no '#/\\$defs/none'"),
        ({"$ref": "#"}, "without end"),
        ({"type": "string", "pattern": "^[xyz]{9}$"}, "pattern"),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "deeper than 32"),
    ],
)
def test_schema_without_an_instance_is_refused(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineRequestError, match=said):
        make_instance(schema, random.Random(0))
