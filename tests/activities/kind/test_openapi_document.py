"""OpenAPI documents: what is none, what they refer to, and the tools that are made of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from activities.kind.openapi_document import parse_document
from activities.kind.openapi_operation import (
    Operation,
    UnsupportedError,
    build_operation,
    list_operations,
)
from contracts.error import BadInputError
from tests.activities.kind.service import body, document, parameter

NOTHING: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())


def build(tree: dict[str, Any], name: str, given: Any = NOTHING) -> Operation:
    parsed = parse_document("shop.json", json.dumps(tree).encode())
    return build_operation(parsed, name, list_operations(parsed)[name], given)


def properties(operation: Operation) -> dict[str, Any]:
    found = operation.arguments["properties"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "is not an OpenAPI document but nothing"),
        (b"<!doctype html><html>Not here</html>", "is HTML or XML"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b'{"openapi": "3.1.0"', "is not JSON"),
        (b"openapi: 3.1.0\n\tpaths: {", "is not YAML"),
        (b"just words", "is not an OpenAPI document but a text"),
        (b"[1, 2]", "is not an OpenAPI document but an array"),
        (b'{"name": "package"}', "it has no `openapi`"),
        (b'{"swagger": "2.0", "paths": {}}', r"version 2\.0 \(Swagger\)"),
        (b'{"openapi": "4.0.0", "paths": {}}', r"version 4\.0\.0; the versions are 3\.0 and 3\.1"),
        (b'{"openapi": "3.10", "paths": {}}', r"version 3\.10; the"),
        (b'{"openapi": "3.1.0", "paths": []}', "`paths` is not an object but an array"),
        (b"[" * 100_000, "is nested too deeply"),
        (b"openapi: " + b"[" * 100_000, "is not YAML"),
        (b"openapi: &a [*a]\n", "is not YAML: 'a' holds itself"),
        (b"openapi: *a\n", "is not YAML"),
        (b"openapi: 3.1.0\n---\nopenapi: 3.1.0", "more than one document"),
        (b"? [a, b]\n: 1", "a key is an object or an array"),
        (b"openapi: 3.1.0\npaths: !!python/object/apply:os.getcwd []", "is not YAML"),
        (b"openapi: " + b"1" * 5_000, "is not YAML"),
    ],
)
def test_what_is_no_document_is_one_clear_error(raw: bytes, problem: str) -> None:
    with pytest.raises(BadInputError, match=problem) as caught:
        parse_document("shop.json", raw)
    assert "'shop.json'" in caught.value.message


def test_yaml_is_read_by_the_rules_of_1_2() -> None:
    text = """
openapi: 3.1
info: {title: Shop, version: 2024-01-01}
paths:
  /switch:
    get:
      operationId: get_switch
      parameters:
        - name: state
          in: query
          schema: {enum: [on, off, no, 010, 12:30, 2024-01-01, "7", !!str 7, 1e3, -.5]}
      responses: {200: {description: fine}, 404: {$ref: '#/nowhere'}}
"""
    parsed = parse_document("shop.yaml", text.encode())
    found = build_operation(parsed, "get_switch", list_operations(parsed)["get_switch"], NOTHING)
    assert properties(found)["state"]["enum"] == [
        *("on", "off", "no", 10, "12:30", "2024-01-01"),
        *("7", "7", 1000.0, -0.5),
    ]


def test_yaml_whose_parts_hold_each_other_many_times_over_is_refused_in_no_time() -> None:
    lines = ["openapi: 3.1.0", "a0: &a0 {type: string}"]
    for number in range(1, 12):
        parts = ", ".join(f"p{each}: *a{number - 1}" for each in range(10))
        lines.append(f"a{number}: &a{number} {{type: object, properties: {{{parts}}}}}")
    content = "{application/json: {schema: *a11}}"
    lines += [
        "paths:",
        f"  /x: {{post: {{operationId: post_x, requestBody: {{content: {content}}}}}}}",
    ]
    parsed = parse_document("shop.yaml", "\n".join(lines).encode())
    with pytest.raises(BadInputError, match="more than 20,000 schemas"):
        build_operation(parsed, "post_x", list_operations(parsed)["post_x"], NOTHING)


def test_arguments_are_parameters_and_the_properties_of_the_body() -> None:
    operation = build(
        document(
            post_order={
                "path": "/shops/{shop}/order",
                "summary": "Order fruit.",
                "description": "Pays  at\nonce.",
                "parameters": [
                    parameter("shop", "path"),
                    parameter("dry_run", schema={"type": "boolean"}, description="Only  say"),
                    parameter("X-Trace", "header", required=True),
                    parameter("session", "cookie"),
                ],
                "requestBody": body(
                    {
                        "type": "object",
                        "properties": {"fruit": {"type": "string"}, "count": {"type": "integer"}},
                        "required": ["fruit"],
                    }
                ),
            }
        ),
        "post_order",
    )
    assert operation.schema.name == "post_order"
    assert operation.schema.description == "Order fruit. Pays at once"
    assert operation.arguments == {
        "type": "object",
        "properties": {
            "shop": {"type": "string"},
            "dry_run": {"type": "boolean", "description": "Only say"},
            "X-Trace": {"type": "string"},
            "session": {"type": "string"},
            "fruit": {"type": "string"},
            "count": {"type": "integer"},
        },
        "required": ["shop", "X-Trace", "fruit"],
        "additionalProperties": False,
    }


def test_what_would_hide_something_has_another_name() -> None:
    fruit = {"type": "object", "properties": {"id": {"type": "integer"}}}
    found = properties(
        build(
            document(
                put_fruit={
                    "path": "/fruit/{id}",
                    "parameters": [parameter("id", "path"), parameter("id"), parameter("body")],
                    "requestBody": body(fruit),
                }
            ),
            "put_fruit",
        )
    )
    assert list(found) == ["id", "query_id", "body", "request_body"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "string"}},
        {"anyOf": [{"type": "string"}, {"type": "object"}]},
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"type": ["object", "null"], "properties": {"x": {}}},
        {"type": "object", "properties": {"x": {}}, "minProperties": 1},
    ],
)
def test_body_that_is_no_plain_object_is_one_argument(schema: Any) -> None:
    operation = build(document(post_x={"requestBody": body(schema)}), "post_x")
    assert properties(operation) == {"body": schema}
    assert operation.arguments["required"] == ["body"]


def test_optional_body_with_a_required_part_is_one_argument_that_may_be_left_out() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    operation = build(document(post_x={"requestBody": body(schema, required=False)}), "post_x")
    assert properties(operation) == {"body": schema}
    assert operation.arguments["required"] == []


def test_what_the_agent_file_gives_is_not_asked_of_the_model() -> None:
    tree = document(
        get_x={
            "parameters": [
                parameter("api_key", required=True),
                parameter("X-Key", "header", required=True),
                parameter("Idempotency-Key", "header", required=True),
                parameter("Authorization", "header", required=True),
                parameter("q"),
            ]
        }
    )
    operation = build(tree, "get_x", (frozenset({"x-key"}), frozenset({"api_key"})))
    assert list(properties(operation)) == ["q"]
    assert operation.arguments["required"] == []


def test_dialect_of_3_0_becomes_json_schema() -> None:
    schema = {
        "type": "object",
        "properties": {
            "kind": {"type": "string", "nullable": True, "enum": ["a", "b"], "example": "a"},
            "price": {"type": "number", "minimum": 0, "exclusiveMinimum": True, "format": "double"},
            "most": {"type": "integer", "maximum": 9, "exclusiveMaximum": False},
            "owner": {"allOf": [{"$ref": "#/components/schemas/Owner"}], "nullable": True},
            "code": {"type": "string", "pattern": r"^\p{L}+$", "xml": {"name": "c"}},
            "id": {"type": "string", "readOnly": True},
        },
        "required": ["kind", "id"],
    }
    tree = document(version="3.0.3", post_x={"requestBody": body(schema)})
    tree["components"] = {"schemas": {"Owner": {"type": "string", "title": "Owner"}}}
    operation = build(tree, "post_x")
    assert properties(operation) == {
        "kind": {"type": ["string", "null"], "enum": ["a", "b", None], "examples": ["a"]},
        "price": {"type": "number", "exclusiveMinimum": 0},
        "most": {"type": "integer", "maximum": 9},
        "owner": {"anyOf": [{"allOf": [{"$ref": "#/$defs/Owner"}]}, {"type": "null"}]},
        "code": {"type": "string"},
    }
    assert operation.arguments["required"] == ["kind"]
    assert operation.arguments["$defs"] == {"Owner": {"type": "string"}}


def test_recursive_schema_stays_a_reference() -> None:
    tree = document(post_x={"requestBody": {"$ref": "#/components/requestBodies/Tree"}})
    node = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "parts": {"type": "array", "items": {"$ref": "#/components/schemas/a~1node"}},
        },
    }
    tree["components"] = {
        "requestBodies": {"Tree": body({"$ref": "#/components/schemas/a~1node"})},
        "schemas": {"a/node": node},
    }
    operation = build(tree, "post_x")
    assert properties(operation)["parts"]["items"] == {"$ref": "#/$defs/a_node"}
    assert operation.arguments["$defs"] == {
        "a_node": node
        | {
            "properties": {
                "name": {"type": "string"},
                "parts": {"type": "array", "items": {"$ref": "#/$defs/a_node"}},
            }
        }
    }


TO_A, TO_B = {"$ref": "#/components/schemas/A"}, {"$ref": "#/components/schemas/B"}


def test_object_that_is_put_together_is_one_object() -> None:
    tree = document(
        post_x={
            "requestBody": body(
                {
                    "allOf": [{"$ref": "#/components/schemas/Named"}, {"required": ["age"]}],
                    "properties": {"age": {"type": "integer"}},
                }
            )
        },
        post_y={"requestBody": body({"allOf": [{"type": "object"}, {"minProperties": 1}]})},
    )
    named = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    tree["components"] = {"schemas": {"Named": {"allOf": [named]}}}
    operation = build(tree, "post_x")
    assert properties(operation) == {"name": {"type": "string"}, "age": {"type": "integer"}}
    assert operation.arguments["required"] == ["name", "age"]
    assert list(properties(build(tree, "post_y"))) == ["body"]


LOOPS: dict[str, dict[str, Any]] = {
    "a parameter": {"parameters": {"A": {"$ref": "#/components/parameters/A"}}},
    "a schema": {"schemas": {"A": TO_A}},
    "a schema of itself": {"schemas": {"A": {"allOf": [TO_A]}}},
    "two schemas": {"schemas": {"A": TO_B, "B": TO_A}},
    "within": {
        "schemas": {
            "A": {"type": "object", "properties": {"x": TO_B}},
            "B": {"allOf": [{"anyOf": [TO_B]}]},
        }
    },
}


@pytest.mark.parametrize("components", LOOPS.values(), ids=LOOPS)
def test_references_that_never_end_are_one_clear_error(components: dict[str, Any]) -> None:
    kind = "parameters" if "parameters" in components else "schemas"
    reference = {"$ref": f"#/components/{kind}/A"}
    given: dict[str, Any] = (
        {"parameters": [reference]} if kind == "parameters" else {"requestBody": body(reference)}
    )
    tree = document(post_x=given) | {"components": components}
    with pytest.raises(BadInputError, match="leads back to itself") as caught:
        build(tree, "post_x")
    assert "#/components/" in caught.value.message


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("other.yaml#/Fruit", "leads out of the document"),
        ("https://example.com/x.json", "leads out of the document"),
        ("#/components/schemas/Gone", "leads nowhere"),
        ("#anchor", "leads nowhere"),
        ("#/info/title", "is not an object but a text"),
    ],
)
def test_references_elsewhere_are_one_clear_error(reference: str, problem: str) -> None:
    schema = {"type": "object", "properties": {"x": {"$ref": reference}}}
    with pytest.raises(BadInputError, match=problem):
        build(document(post_x={"requestBody": body(schema)}), "post_x")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"parameters": [parameter("x", schema={"type": "strng"})]}, "not JSON schema"),
        ({"parameters": [parameter("x", schema={"minimum": "much"})]}, "not JSON schema"),
        ({"parameters": [parameter("x", schema=[])]}, "a schema is not an object but an array"),
        ({"parameters": {}, "requestBody": 7}, "is not an object but a number"),
        ({"parameters": [{"$ref": 7, "in": "query"}]}, r"a parameter '' in 'query'"),
        ({"parameters": [parameter("a: b", "header")]}, "is no name of a header"),
        ({"parameters": [parameter("x", schema={"properties": 3})]}, "`properties` of a schema"),
        ({"parameters": [parameter("x", schema={"anyOf": 3})]}, "`anyOf` of a schema"),
    ],
)
def test_operation_that_is_not_as_openapi_says_is_one_clear_error(given: Any, problem: str) -> None:
    with pytest.raises(BadInputError, match=problem):
        build(document(post_x=given), "post_x")


@pytest.mark.parametrize("media_type", ["multipart/form-data", "application/xml", "image/png"])
def test_body_that_cannot_be_sent_is_unsupported_unless_it_may_be_left_out(media_type: str) -> None:
    tree = document(
        post_x={"requestBody": body({"type": "object"}, media_type)},
        post_y={"requestBody": body({"type": "object"}, media_type, required=False)},
    )
    with pytest.raises(UnsupportedError, match=f"its body is {media_type}"):
        build(tree, "post_x")
    assert build(tree, "post_y").body is None


def test_names_fit_whatever_the_document_says() -> None:
    tree = document(
        get_a={"operationId": "pets.list all"},
        get_b={"operationId": "123 é"},
        get_c={"path": "/c/{id}", "operationId": None},
        get_d={"operationId": "same"},
        get_e={"operationId": "same"},
        get_f={"operationId": "x" * 300},
    )
    parsed = parse_document("shop.json", json.dumps(tree).encode())
    places = list_operations(parsed)
    named = {
        remote: build_operation(parsed, remote, place, NOTHING).schema.name
        for remote, place in places.items()
    }
    assert named == {
        "pets.list all": "pets_list_all",
        "123 é": "get_b",
        "GET /c/{id}": "get_c_id",
        "GET /d": "same",
        "GET /e": "same",
        "GET /f": "x" * 64,
    }


def test_model_is_told_what_every_grammar_can_keep_and_the_rest_is_checked_at_the_call() -> None:
    tags = {"type": "array", "items": {"$ref": "#/components/schemas/Tag"}, "uniqueItems": True}
    tree = document(post_x={"requestBody": body({"type": "object", "properties": {"tags": tags}})})
    tree["components"] = {"schemas": {"Tag": {"type": "string", "format": "uuid"}}}
    operation = build(tree, "post_x")
    told, checked = operation.schema.arguments, operation.arguments
    assert "uniqueItems" not in json.dumps(told) and "uuid" not in json.dumps(told)
    assert "uniqueItems" in json.dumps(checked) and "uuid" in json.dumps(checked)
    assert told["$defs"] == {"Tag_1": {"type": "string"}}


def test_path_without_its_parameter_declared_takes_a_text() -> None:
    operation = build(document(get_x={"path": "/x/{id}"}), "get_x")
    assert operation.arguments["required"] == ["id"]
