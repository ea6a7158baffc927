"""The rules by which calls need people's approval: JSON schemas that the arguments match or not.

A rule is checked when an agent is: patterns are those of Rust's `regex`, which takes time linear in
the text, since a model chooses what they are tried on; and nothing is fetched from elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import extend
from pydantic import JsonValue
from pydantic_core import SchemaError as PatternError
from pydantic_core import SchemaValidator, core_schema
from referencing import Registry
from referencing.exceptions import Unresolvable
from temporalio import activity

from activities.error_map import application_error
from activities.thread import start_thread
from contracts.agent import AgentSpec, SubAgent, ToolRef
from contracts.approval import CheckApprovalInput, CheckApprovalResult
from contracts.error import BadInputError, MusterError
from contracts.name import CHECK_APPROVAL

CHECK_TIMEOUT_S = 10.0
"""How long one check may take; less than what its activity has."""

MAX_SHOWN_CHARS = 500
"""Of what is wrong with a rule."""


def _pattern(
    validator: Any, pattern: str, instance: object, schema: object
) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not _compiled(pattern).isinstance_python(instance):
        yield ValidationError(f"does not match {pattern!r}")


def _compiled(pattern: str) -> SchemaValidator:
    return SchemaValidator(core_schema.str_schema(pattern=pattern, strict=True))


_Rule: Any = extend(Draft202012Validator, {"pattern": _pattern})  # type: ignore[no-untyped-call]

_OF_NAMES = ("properties", "$defs", "definitions", "dependentSchemas", "dependentRequired")
"""Keywords whose keys are names that the author chose, not keywords."""

_OF_VALUES = ("const", "enum", "default", "examples")
"""Keywords that hold plain values, not schemas."""


def check_rule(tool: str, when: Mapping[str, JsonValue]) -> None:
    """Check the rule by which a tool needs approval; raises BadInputError if it is none."""
    try:
        Draft202012Validator.check_schema(when)
        _check_patterns(when)
        _Rule(when, registry=Registry()).is_valid({})
    except SchemaError as error:
        place = "".join(f"[{part!r}]" for part in error.absolute_path) or "its root"
        raise _bad(tool, f"at {place}: {error.message[:MAX_SHOWN_CHARS]}") from None
    except PatternError as error:
        raise _bad(tool, f"a pattern: {' '.join(str(error).split())[:MAX_SHOWN_CHARS]}") from None
    except Unresolvable as error:
        raise _bad(tool, f"a $ref in it leads nowhere: {error.ref!r}") from None
    except RecursionError:
        raise _bad(tool, "it is nested too deeply, or a $ref leads back to itself") from None
    if not when or not any(key in Draft202012Validator.VALIDATORS for key in when):
        raise _bad(tool, "it says nothing, so every call would match: write `approval: always`")


def check_rules(agent: AgentSpec) -> None:
    """Check the rules of all of an agent's tools and sub-agents."""
    callables: tuple[ToolRef | SubAgent, ...] = (*agent.tools, *agent.agents)
    for each in callables:
        policy = each.approval_policy
        if policy and policy.when is not None:
            check_rule(each.tool_name, policy.when)


def matches(when: Mapping[str, JsonValue], arguments: Mapping[str, JsonValue]) -> bool:
    """Say whether a call's arguments match a rule; raises what a rule raises that was not checked.

    A property that the call leaves out matches, as in JSON schema: `required` rules that out.
    """
    return bool(_Rule(when, registry=Registry()).is_valid(arguments))


@activity.defn(name=CHECK_APPROVAL)
async def check_approval(check: CheckApprovalInput) -> CheckApprovalResult:
    """Say whether a call needs approval by its policy's rule.

    Raises ApplicationError, not retryable, where that cannot be found out.
    """
    tool = check.call.tool
    work = start_thread(lambda: matches(check.when, check.call.arguments), f"rule of {tool}")
    done, _ = await asyncio.wait({work}, timeout=CHECK_TIMEOUT_S)
    try:
        if not done:
            raise _bad(tool, f"it takes longer than {CHECK_TIMEOUT_S:g} s on these arguments")
        ended = work.result()
        if ended.error is not None:
            raise _bad(tool, f"{type(ended.error).__name__} on these arguments")
    except MusterError as error:
        raise application_error(error) from None
    return CheckApprovalResult(is_needed=ended.value)


def _check_patterns(schema: object) -> None:
    """Compile every pattern; refuse the one keyword that would try patterns the slow way."""
    if isinstance(schema, list):
        for inner in schema:
            _check_patterns(inner)
    if not isinstance(schema, Mapping):
        return
    if isinstance(schema.get("pattern"), str):
        _compiled(schema["pattern"])
    if "patternProperties" in schema:
        raise SchemaError("patternProperties cannot be part of a rule")
    for key, inner in schema.items():
        if key in _OF_NAMES and isinstance(inner, Mapping):
            _check_patterns(list(inner.values()))
        elif key not in _OF_VALUES:
            _check_patterns(inner)


def _bad(tool: str, problem: str) -> BadInputError:
    return BadInputError(
        f"tool {tool!r}: `approval.when` is no rule that arguments can be tried on; {problem}",
        hint="as in: {properties: {amount: {exclusiveMinimum: 100}}, required: [amount]}",
    )
