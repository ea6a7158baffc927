"""Plans that are wrong, each told in one error that names node and place, before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from contracts.error import LimitExceededError, MusterError
from contracts.plan import Case, Plan
from workflows.plan_check import check_plan, check_plan_input
from workflows.plan_place import PlanError

INPUT = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "cities": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
    "additionalProperties": False,
}
ANSWER = {
    "type": "object",
    "properties": {"high": {"type": "integer"}, "sky": {"type": "string"}},
    "required": ["high", "sky"],
    "additionalProperties": False,
}
TOOLS = [{"function": "shop.tools:search"}, {"function": "shop.tools:read"}]
AGENTS = [
    {
        "name": "helper",
        "description": "Helps.",
        "agent": {"name": "helper", "instructions": "Help."},
    }
]


def plan(nodes: dict[str, Any], **fields: Any) -> Plan:
    """A plan of these nodes, with an input, tools and an agent."""
    whole = {"name": "trip", "input": INPUT, "tools": TOOLS, "agents": AGENTS, "nodes": nodes}
    return Plan.model_validate({**whole, **fields})


def llm(text: str, **fields: Any) -> dict[str, Any]:
    """A node that asks the model."""
    return {"llm": text, **fields}


def way(*cases: dict[str, Any], of: str = "${pick}", **fields: Any) -> dict[str, Any]:
    """A branch."""
    return {"branch": of, "cases": list(cases), **fields}


PICK = llm("Which?", choices=["yes", "no"])
YES_NO = way({"equals": "yes", "then": "a"}, {"equals": "no", "then": "b"})
EACH = {"map": "${input.cities}", "do": {"one": llm("${item}")}}

BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a cycle": (
        {"a": llm("${c}"), "b": llm("${a}"), "c": llm("${b}")},
        {},
        "node 'a': nodes wait for each other: a → c → b → a",
    ),
    "a node that refers to itself": (
        {"a": llm("Again: ${a}")},
        {},
        "node 'a', `llm`: ${a}: the node refers to itself",
    ),
    "a reference to nothing": (
        {"a": {"tool": "search", "arguments": {"q": {"text": "${b}"}}}},
        {},
        "node 'a', `arguments.q.text`: ${b}: there is no node 'b'",
    ),
    "a reference that cannot be read": (
        {"a": llm("Tell ${input.city")},
        {},
        "node 'a', `llm`: '${input.city': no `}` where the reference should end",
    ),
    "a field that the input has not": (
        {"a": llm("${input.town}")},
        {},
        "node 'a', `llm`: ${input.town}: ${input} has no 'town'",
    ),
    "a field that an output has not": (
        {"a": llm("x", output=ANSWER), "b": llm("${a.low}")},
        {},
        "node 'b', `llm`: ${a.low}: ${a} has no 'low'",
    ),
    "a field of a text": (
        {"a": {"tool": "search"}, "b": llm("${a.price}")},
        {},
        "node 'b', `llm`: ${a.price}: ${a} is string, not an object",
    ),
    "an item of what is no list": (
        {"a": llm("${input.city[0]}")},
        {},
        "node 'a', `llm`: ${input.city[0]}: ${input.city} is string, not an array",
    ),
    "a map over what is no list": (
        {"a": {"map": "${input.city}", "do": {"one": llm("${item}")}}},
        {},
        "node 'a', `map`: it takes a list, ${input.city} is string",
    ),
    "a case that the model cannot choose": (
        {"pick": PICK, "go": way({"equals": "maybe", "then": "a"}), "a": llm("x")},
        {},
        "node 'go', `cases[0]`: it is never chosen: ${pick} is one of yes, no, never maybe",
    ),
    "a case of another type": (
        {"p": llm("x", output=ANSWER), "go": way({"equals": "9", "then": "a"}, of="${p.high}")}
        | {"a": llm("x")},
        {},
        "node 'go', `cases[0]`: it is never chosen: ${p.high} is number, never 9, which is string",
    ),
    "a bound on a text": (
        {"p": llm("x", output=ANSWER), "go": way({"above": 9, "then": "a"}, of="${p.sky}")}
        | {"a": llm("x")},
        {},
        "node 'go', `cases[0]`: it is never chosen: ${p.sky} is string, and only numbers are above "
        "or below",
    ),
    "a case that comes too late": (
        {"pick": PICK, "a": llm("x"), "b": llm("x")}
        | {"go": way({"equals": "yes", "then": "a"}, {"equals": "yes", "then": "b"})},
        {},
        "node 'go', `cases[1]`: it is never chosen: case 0 tests the same, and comes before",
    ),
    "an item outside of a map": (
        {"a": llm("${item}")},
        {},
        "node 'a', `llm`: ${item}: there is no item outside of a map",
    ),
    "an inner node from outside": (
        {"each": EACH, "a": llm("${one}")},
        {},
        "node 'a', `llm`: ${one}: 'one' is inside of the map 'each', it runs once for each item",
    ),
    "an inner node's fallback outside": (
        {"each": {**EACH, "do": {"one": llm("${item}", fallback="a")}}, "a": llm("x")},
        {},
        "node 'each.one', `fallback`: there is no node 'a' in this map",
    ),
    "fallbacks that go round": (
        {"a": llm("x", fallback="b"), "b": llm("x", fallback="a")},
        {},
        "node 'a', `fallback`: fallbacks go round: a → b → a",
    ),
    "a fallback of two": (
        {"a": llm("x", fallback="c"), "b": llm("x", fallback="c"), "c": llm("x")},
        {},
        "node 'b', `fallback`: 'c' is the fallback of 'a' too",
    ),
    "a fallback that needs what has failed": (
        {"a": llm("x", fallback="b"), "b": llm("Mend ${a}")},
        {},
        "node 'b', `llm`: ${a}: 'a' has failed when its fallback runs, and gives nothing",
    ),
    "a fallback that needs what waits for it": (
        {"a": llm("x", fallback="b"), "c": llm("${a}"), "b": llm("${c}")},
        {},
        "node 'c': nodes wait for each other: c → b → c",
    ),
    "a reference to a fallback": (
        {"a": llm("x", fallback="b"), "b": llm("x"), "c": llm("${b}")},
        {},
        "node 'c', `llm`: 'b' is the fallback of 'a', and its value stands for that one's",
    ),
    "a node that can never run": (
        {"pick": PICK, "go": YES_NO, "a": llm("x"), "b": llm("x"), "c": llm("${a} ${b}")},
        {},
        "node 'c': it never runs: branch 'go' chooses one of 'a' and 'b', and it needs 'a' and 'b'",
    ),
    "a node of two branches": (
        {"pick": PICK, "go": YES_NO, "a": llm("x"), "b": llm("x")}
        | {"more": way({"equals": "no", "then": "a"})},
        {},
        "node 'more', `cases`: 'a' is chosen by 'go' too",
    ),
    "a branch to nowhere": (
        {"pick": PICK, "go": way({"equals": "yes", "then": "there"})},
        {},
        "node 'go', `cases[0].then`: there is no node 'there' in the plan itself",
    ),
    "an output that a branch may leave out": (
        {"pick": PICK, "go": YES_NO, "a": llm("x"), "b": llm("x")},
        {"output": {"said": "${a}"}},
        "the plan, `output.said`: ${a}: 'a' may have no value: branch 'go' may choose another way",
    ),
    "an output behind what may be skipped": (
        {"a": llm("x", on_failure="skip"), "b": llm("${a}")},
        {"output": "${b}"},
        "the plan, `output`: ${b}: 'b' may have no value: 'a' may be skipped: it has "
        "`on_failure: skip`",
    ),
    "a name used twice": (
        {"each": EACH, "one": llm("x")},
        {},
        "node 'each.one': the name is used twice, for 'one' too",
    ),
    "a name that is taken": (
        {"input": llm("x")},
        {},
        "node 'input': the name is taken: it stands for what the plan or a map gives",
    ),
    "a tool that there is not": (
        {"a": {"tool": "sing"}},
        {},
        "node 'a', `tool`: the plan has no tool 'sing'",
    ),
    "an agent that there is not": (
        {"each": {"map": "${input.cities}", "do": {"one": {"agent": "boss", "task": "x"}}}},
        {},
        "node 'each.one', `agent`: the plan has no agent 'boss'",
    ),
    "an order after nothing": (
        {"a": llm("x", after=["b"])},
        {},
        "node 'a', `after[0]`: there is no node 'b' in the plan itself",
    ),
    "a join of what is outside": (
        {"b": llm("x"), "each": {**EACH, "do": {"one": {"join": ["b"]}}}},
        {},
        "node 'each.one', `join[0]`: there is no node 'b' in this map",
    ),
    "a map that could give two things": (
        {"each": {"map": "${input.cities}", "do": {"one": llm("x"), "two": llm("x")}}},
        {},
        "node 'each': it does not say what an item gives, and 2 nodes in it could: one, two",
    ),
    "maps too deep": (
        {
            "a": {"map": [1], "do": {"b": {"map": [1], "do": {"c": {"map": [1], "do": {
                "d": {"map": [1], "do": {"e": {"map": [1], "do": {"f": llm("x")}}}}}}}}}}
        },
        {},
        "node 'a.b.c.d.e': maps in maps, 5 levels; the limit is 4",
    ),
    "a tool led as by a model": (
        {"a": {"tool": "search"}},
        {"tools": [{"function": "shop.tools:search", "max_calls": 1}]},
        "tool 'shop.tools:search': `max_calls` leads a model, and a plan's nodes are led by the "
        "plan",
    ),
    "two tools of one name": (
        {"a": {"tool": "search"}},
        {"tools": [{"function": "a.b:search"}, {"function": "c.d:search"}]},
        "two tools or agents are named 'search'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_plan_is_told_in_one_error(kind: str) -> None:
    nodes, fields, message = BAD[kind]
    with pytest.raises(MusterError) as caught:
        check_plan(plan(nodes, **fields))
    assert caught.value.message == message


@pytest.mark.parametrize("kind", [kind for kind in BAD if "deep" not in kind])
def test_error_leads_to_its_place_in_the_file(kind: str) -> None:
    nodes, fields, _ = BAD[kind]
    whole = plan(nodes, **fields)
    with pytest.raises(PlanError) as caught:
        check_plan(whole)
    at: Any = whole.model_dump(mode="json")
    for step in caught.value.path:
        at = at[step]


SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "no kind": ({"after": []}, "a node has exactly one of llm, tool, approval, agent"),
    "two kinds": ({"llm": "x", "tool": "search"}, "a node has exactly one of llm, tool"),
    "two forms": (llm("x", choices=["a"], output={}), "`choices` and `output` exclude each other"),
    "two ways to fail": (
        llm("x", fallback="a", on_failure="skip"),
        "`fallback` and `on_failure: skip` exclude each other",
    ),
    "a join that fails": ({"join": ["a"], "on_failure": "skip"}, "a join does not fail"),
    "an approval that fails": ({"approval": "x", "on_failure": "skip"}, "a denial is no failure"),
    "an approval that nobody can give": ({"approval": "x", "people": 2, "by": ["ann"]}, "by"),
    "a case without a test": (way({"then": "a"}), "a case says when it holds"),
    "what is not built": (llm("x", on_failure="replan"), "Input should be 'fail' or 'skip'"),
    "a role": (llm("x", role="decide"), "Extra inputs are not permitted"),
    "a timeout of a join": ({"join": ["a"], "timeout": 3}, "Extra inputs are not permitted"),
    "a name with a dot": ({"map": [1], "do": {"a.b": llm("x")}}, "should match pattern"),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_bad_node_is_refused_when_it_is_read(kind: str) -> None:
    node, message = SHAPES[kind]
    with pytest.raises(ValidationError) as caught:
        plan({"x": node, "a": llm("x")})
    assert message in str(caught.value)


GOOD: dict[str, dict[str, Any]] = {
    "a way behind a way": {
        "pick": PICK, "go": YES_NO, "a": llm("x"), "b": llm("x"), "c": llm("${a}"),
        "end": {"join": ["c", "b"], "first": True},
    },
    "a value from around a map": {
        "a": llm("x", output=ANSWER),
        "each": {"map": "${input.cities}", "do": {"one": llm("${item} ${index} ${a.sky}")}},
        "b": llm("${each[0]}"),
    },
    "a map in a map": {
        "each": {
            "map": [[1], [2, 3]],
            "do": {"inner": {"map": "${item}", "do": {"one": llm("${item}")}}},
        }
    },
    "a map with a fallback inside": {
        "each": {
            "map": "${input.cities}",
            "do": {"one": llm("x", fallback="two"), "two": llm("y")},
            "gives": {"city": "${item}", "said": "${one}"},
        },
        "b": llm("${each[1].said}"),
    },
    "a fallback of another type": {
        "a": llm("x", output=ANSWER, fallback="b"),
        "b": {"tool": "search"},
        "c": llm("${a.sky}"),
    },
    "an approval": {
        "ok": {"approval": "Send it?"},
        "go": way({"equals": True, "then": "a"}, of="${ok.approved}"),
        "a": {"agent": "helper", "task": "Send it."},
    },
    "dollars": {"a": llm("It costs $${x} or $5.")},
}  # fmt: skip


@pytest.mark.parametrize("kind", GOOD)
def test_good_plan_passes(kind: str) -> None:
    whole = plan(GOOD[kind])
    check_plan(whole)
    again = Plan.model_validate_json(whole.model_dump_json())
    assert again == whole
    assert again.model_dump(mode="json") == whole.model_dump(mode="json")


def test_case_that_was_sent_tests_what_it_tested() -> None:
    case = Case.model_validate({"equals": None, "then": "a"})
    again = Case.model_validate_json(case.model_dump_json())
    assert again.tests == case.tests == {"equals"}


def test_plan_that_is_too_large_is_refused() -> None:
    with pytest.raises(LimitExceededError, match="plan 'trip', as JSON"):
        check_plan(plan({"a": llm("x" * 300_000)}))
    inner = {f"i{number}": llm("x") for number in range(300)}
    many = {"each": {"map": [1], "do": inner, "gives": 1}}
    many |= {f"n{number}": llm("x") for number in range(300)}
    with pytest.raises(LimitExceededError, match="601 nodes, the limit is 500 nodes"):
        check_plan(plan(many))


def test_joins_of_joins_are_checked_without_doubling_at_each_step() -> None:
    nodes: dict[str, Any] = {"a0": llm("x", output=ANSWER), "b0": llm("x")}
    for number in range(1, 60):
        both = [f"a{number - 1}", f"b{number - 1}"]
        nodes[f"a{number}"] = {"join": both, "first": True}
        nodes[f"b{number}"] = {"join": both, "first": number % 2 == 0}
    nodes["end"] = llm("${a59.sky} ${b59}")
    check_plan(plan(nodes))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "the input lacks 'city'"),
        ({"city": 3}, "the input.city is not string but integer"),
        ({"city": "x", "cities": ["a", None]}, "the input.cities[1] is not string but null"),
        ({"city": "x", "town": 1}, "the input has 'town', which its schema does not know"),
    ],
)
def test_bad_input_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match="plan 'trip': ") as caught:
        check_plan_input(plan({"a": llm("x")}), given)
    assert message in caught.value.message


def test_good_input_passes() -> None:
    check_plan_input(plan({"a": llm("x")}), {"city": "Tunis", "cities": []})


def test_input_that_is_too_large_is_refused() -> None:
    with pytest.raises(LimitExceededError, match="the plan's input, as JSON"):
        check_plan_input(plan({"a": llm("x")}), {"city": "x" * 200_000})
