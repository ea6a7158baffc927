"""JSON schemas that others wrote: whether they are any, and whether arguments fit them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from pydantic import JsonValue
from referencing import Registry
from referencing.exceptions import Unresolvable

from activities.tool import WrongArgumentsError
from contracts.error import BadInputError

MAX_SHOWN_CHARS = 1_500
"""How much of a schema, or of what is wrong, an error text shows."""


def check_schema(tool: str, schema: Mapping[str, JsonValue]) -> None:
    """Check the schema of a tool's arguments; raises BadInputError if it is none of an object."""
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        place = "".join(f"[{part!r}]" for part in error.absolute_path) or "its root"
        raise _bad(tool, f"at {place}: {error.message[:MAX_SHOWN_CHARS]}") from None
    except RecursionError:
        raise _bad(tool, "it is nested too deeply") from None
    if schema.get("type") != "object":
        raise _bad(tool, f"its type is {schema.get('type')!r}, not 'object'")
    try:
        # What a `$ref` leads to is looked up only when something is checked against it.
        _validator(schema).is_valid({})
    except Unresolvable as error:
        raise _bad(tool, f"a $ref in it leads nowhere: {error.ref!r}") from None
    except RecursionError:
        raise _bad(tool, "a $ref in it leads back to itself") from None


def check_arguments(
    tool: str, schema: Mapping[str, JsonValue], arguments: Mapping[str, JsonValue]
) -> None:
    """Check a call's arguments; raises WrongArgumentsError that says what was expected."""
    try:
        error = best_match(_validator(schema).iter_errors(arguments))
    except (Unresolvable, RecursionError) as broken:
        raise WrongArgumentsError(
            f"the schema of tool {tool!r} cannot be followed for these arguments: "
            f"{type(broken).__name__}"
        ) from None
    if error is not None:
        where = ".".join(str(part) for part in error.absolute_path) or "arguments"
        expected = json.dumps(schema, ensure_ascii=False)[:MAX_SHOWN_CHARS]
        raise WrongArgumentsError(
            f"wrong arguments for tool {tool!r}: {where}: {error.message[:MAX_SHOWN_CHARS]}. "
            f"Expected: {expected}"
        )


def _validator(schema: Mapping[str, JsonValue]) -> Draft202012Validator:
    """Return a validator that fetches nothing: a `$ref` of a stranger's may name any address."""
    return Draft202012Validator(schema, registry=Registry())


def _bad(tool: str, problem: str) -> BadInputError:
    return BadInputError(
        f"tool {tool!r}: the schema of its arguments is not JSON schema of an object; {problem}",
        hint='give it as JSON schema (2020-12): {"type": "object", "properties": {...}}',
    )
