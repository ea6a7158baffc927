"""The progress of plans: every node once, after its inputs, as wide as may be, in any order."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts.plan import Plan
from contracts.plan_job import NodeStatus
from tests.plan.dag import play, random_plan, widest_of
from workflows.plan_check import check_plan
from workflows.plan_graph import graph_of
from workflows.plan_progress import Progress
from workflows.plan_state import BodyState, reset_failed

SEEDS = st.integers(0, 2**32)
SIZES = st.integers(1, 200)
slow = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@slow
@given(SEEDS, SIZES)
def test_every_node_runs_once_after_its_inputs_and_in_any_order_the_result_is_the_same(
    seed: int, size: int
) -> None:
    plan = random_plan(random.Random(seed), size)
    check_plan(plan)
    first = play(plan, random.Random(seed))
    assert set(first.begun.values()) <= {1}
    other = play(plan, random.Random(seed + 1))
    assert other.output == first.output
    assert other.done == first.done, "each node was given the same, so its inputs were there"
    assert other.begun == first.begun


@slow
@given(SEEDS, SIZES)
def test_plan_taken_up_from_its_state_at_any_point_ends_the_same(seed: int, size: int) -> None:
    plan = random_plan(random.Random(seed), size)
    plain = play(plan, random.Random(seed))
    again = play(plan, random.Random(seed + 1), restarts=True)
    assert again.output == plain.output
    assert again.done == plain.done


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 12))
def test_map_is_as_wide_as_it_may_be(parallel: int, width: int, items: int) -> None:
    inner = {"one": {"tool": "t", "arguments": {"of": "${item}"}}}
    plan = of({"each": {"map": list(range(items)), "do": inner, "width": width}}, parallel)
    trace = play(plan, random.Random(0))
    assert trace.widest == widest_of(plan)
    assert len(trace.output["each"]) == items


def test_nodes_without_inputs_run_all_at_once() -> None:
    trace = play(of({f"n{number}": {"tool": "t"} for number in range(64)}), random.Random(0))
    assert trace.widest == 64


def test_inner_maps_fill_the_room_that_there_is() -> None:
    trace = play(of(nested([3, 3, 3, 3]), 20), random.Random(0))
    assert trace.widest == 20
    assert sum(trace.begun.values()) == 81


def test_no_more_items_are_open_than_there_is_room_for() -> None:
    root = BodyState()
    progress = Progress(of(nested([50, 50]), 4), root, {})
    while progress.take():
        pass
    [outer] = root.nodes.values()
    assert len(outer.open) == 1
    assert len(progress.running) == 4


def test_large_plan_is_followed_quickly() -> None:
    """A chain of 500 skipped nodes is no recursion, 10,000 items no squares of them."""
    chain: dict[str, Any] = {
        "a": {"branch": 1, "cases": [{"equals": 2, "then": "n0"}]},
        "n0": {"tool": "t"},
    }
    for number in range(1, 490):
        chain[f"n{number}"] = {"tool": "t", "after": [f"n{number - 1}"]}
    assert play(of(chain), random.Random(0)).begun == {}
    many = {"each": {"map": [0] * 10_000, "do": {"one": {"join": ["two"]}, "two": {
        "branch": 1, "cases": [{"equals": 2, "then": "three"}]}, "three": {"tool": "t"}},
        "gives": "${index}"}}  # fmt: skip
    assert play(of(many), random.Random(0)).output["each"] == list(range(10_000))


def of(nodes: dict[str, Any], parallel: int = 64, **fields: Any) -> Plan:
    """A plan of these nodes."""
    plan = Plan.model_validate(
        {"name": "p", "tools": [{"function": "a.b:t"}], "nodes": nodes, "max_parallel": parallel}
        | fields
    )
    check_plan(plan)
    return plan


def nested(widths: list[int]) -> dict[str, Any]:
    """A map in a map, one for each width, with a tool at the bottom."""
    body: dict[str, Any] = {"leaf": {"tool": "t", "arguments": {"of": ["${item}", "${index}"]}}}
    for level, width in reversed(list(enumerate(widths))):
        body = {f"level{level}": {"map": list(range(width)), "do": body, "width": width}}
    return body


def begin(plan: Plan, root: BodyState | None = None) -> tuple[Progress, BodyState]:
    """Begin a plan and take all that may run."""
    root = root or BodyState()
    progress = Progress(plan, root, {})
    while progress.take():
        pass
    return progress, root


def test_failure_fails_the_plan_and_what_is_done_is_kept_for_another_try() -> None:
    inner = {"one": {"tool": "t", "arguments": {"of": ["${a}", "${item}"]}}}
    nodes = {
        "a": {"tool": "t"},
        "each": {"map": [1, 2, 3], "do": inner},
        "end": {"tool": "t", "arguments": {"of": "${each}"}},
    }
    progress, root = begin(of(nodes))
    progress.finish(("a",), "A")
    while progress.take():
        pass
    progress.finish(("each", 1, "one"), "ONE")
    progress.fail(("each", 2, "one"), "no shop")
    assert progress.failure == (("each",), "each[2].one: no shop")
    assert progress.take_dropped() == [("each", 0, "one")]
    assert progress.is_over
    progress.finish(("each", 0, "one"), "late")
    kept = BodyState.model_validate_json(root.model_dump_json())
    reset_failed(kept)
    progress, _ = begin(of(nodes), kept)
    assert list(progress.running) == [("each", 0, "one"), ("each", 2, "one")]
    assert progress.filled(("each", 0, "one"), "${a}") == "A"
    progress.finish(("each", 0, "one"), "ZERO")
    progress.finish(("each", 2, "one"), "TWO")
    assert progress.take() == ("end",)
    assert progress.filled(("end",), "${each}") == ["ZERO", "ONE", "TWO"]


def test_map_that_failed_by_what_an_item_gives_fails_again_when_it_is_retried() -> None:
    each = {
        "map": [1, 2],
        "do": {"one": {"tool": "t", "output": {}}},
        "gives": "${one.x}",
    }
    progress, root = begin(of({"each": each}))
    progress.finish(("each", 0, "one"), {"x": 1})
    progress.finish(("each", 1, "one"), {"y": 1})
    assert progress.failure == (("each",), "each[1]: ${one.x}: ${one} has no 'x'")
    reset_failed(root)
    progress, _ = begin(of({"each": each}), root)
    assert progress.failure == (("each",), "each[1]: ${one.x}: ${one} has no 'x'")


def test_map_whose_item_gave_too_much_begins_anew_when_it_is_retried() -> None:
    each = {"map": [1, 2], "do": {"one": {"tool": "t"}}, "gives": ["${one}", "${one}"], "width": 1}
    progress, root = begin(of({"each": each}))
    progress.finish(("each", 0, "one"), "x" * 600_000)
    assert progress.failure is not None
    assert progress.failure[1].startswith("with its results, the plan's values have 1,200,0")
    reset_failed(root)
    progress, _ = begin(of({"each": each}), root)
    assert list(progress.running) == [("each", 0, "one")]
    assert progress.held_bytes == 0


def test_failure_in_a_map_is_the_maps_to_deal_with() -> None:
    each = {"map": [1, 2], "do": {"one": {"tool": "t"}}, "fallback": "other"}
    nodes = {
        "each": each,
        "other": {"tool": "t"},
        "end": {"tool": "t", "arguments": {"of": "${each}"}},
    }
    progress, root = begin(of(nodes))
    progress.fail(("each", 0, "one"), "no shop")
    assert progress.failure is None
    assert progress.take_dropped() == [("each", 1, "one")]
    assert progress.take() == ("other",)
    progress.finish(("each", 1, "one"), "too late")
    progress.finish(("other",), "instead")
    assert progress.take() == ("end",)
    assert progress.filled(("end",), "${each}") == "instead"
    assert root.nodes["each"].status is NodeStatus.FAILED
    assert root.nodes["each"].error == "each[0].one: no shop"


def test_skipped_item_gives_null() -> None:
    each = {
        "map": [1, 2],
        "do": {"one": {"tool": "t", "on_failure": "skip"}},
        "gives": {"said": "${one}"},
    }
    progress, _ = begin(of({"each": each}))
    progress.fail(("each", 0, "one"), "no")
    progress.finish(("each", 1, "one"), "yes")
    assert progress.output() == {"each": [None, {"said": "yes"}]}


def test_join_takes_the_first_that_was_not_skipped_and_null_if_none_is_left() -> None:
    both = {name: {"tool": "t", "on_failure": "skip"} for name in "ab"}
    plan = of({**both, "j": {"join": ["a", "b"], "first": True}, "k": {"join": ["a", "b"]}})
    progress, _ = begin(plan)
    progress.fail(("a",), "no")
    progress.finish(("b",), "B")
    assert progress.output() == {"j": "B", "k": {"a": None, "b": "B"}}
    progress, _ = begin(plan)
    progress.fail(("a",), "no")
    progress.fail(("b",), "no")
    assert progress.output() == {"j": None, "k": {"a": None, "b": None}}


@pytest.mark.parametrize(
    ("value", "case", "holds"),
    [
        (True, {"equals": True}, True),
        (1, {"equals": True}, False),
        ("a", {"one_of": ["b", "a"]}, True),
        (None, {"equals": None}, True),
        (3, {"above": 2, "below": 4}, True),
        (4, {"above": 2, "below": 4}, False),
        ("3", {"above": 2}, False),
        (True, {"above": 0}, False),
    ],
)
def test_branch_takes_the_first_case_that_holds(
    value: Any, case: dict[str, Any], holds: bool
) -> None:
    plan = of(
        {
            "v": {"tool": "t", "output": {}},
            "go": {"branch": "${v}", "cases": [{**case, "then": "a"}], "otherwise": "b"},
            "a": {"tool": "t"},
            "b": {"tool": "t"},
        }
    )
    progress, root = begin(plan)
    progress.finish(("v",), value)
    assert progress.take() == (("a",) if holds else ("b",))
    assert root.nodes["b" if holds else "a"].status is NodeStatus.SKIPPED


def test_values_are_let_go_once_nothing_needs_them() -> None:
    plan = of(
        {
            "a": {"tool": "t"},
            "b": {"tool": "t", "arguments": {"of": "${a}"}},
            "c": {"tool": "t", "arguments": {"of": "${b}"}},
        },
        output="${c}",
    )
    progress, root = begin(plan)
    progress.finish(("a",), "x" * 1_000)
    assert progress.held_bytes == 1_002
    progress.take()
    progress.finish(("b",), "y")
    assert root.nodes["a"].value is None
    assert progress.held_bytes == 3
    progress.take()
    progress.finish(("c",), "z")
    assert progress.output() == "z"


def test_values_that_are_too_large_together_fail_the_node_that_brings_one_more() -> None:
    plan = of({"a": {"tool": "t"}, "b": {"tool": "t"}})
    progress, _ = begin(plan)
    progress.finish(("a",), "x" * 600_000)
    progress.finish(("b",), "x" * 600_000)
    assert progress.failure is not None
    path, why = progress.failure
    assert path == ("b",)
    assert why == (
        "with what it gives, the plan's values have 1,200,004 bytes, the limit is 1,000,000 bytes"
    )


def test_results_of_a_map_that_are_too_large_together_fail_it() -> None:
    each = {"map": [1, 2, 3], "do": {"one": {"tool": "t"}}}
    progress, _ = begin(of({"each": each}))
    for place in range(3):
        progress.finish(("each", place, "one"), "x" * 400_000)
    assert progress.failure is not None
    assert progress.failure[0] == ("each",)
    assert "the limit is 1,000,000 bytes" in progress.failure[1]


def test_map_over_too_many_items_or_none_at_all() -> None:
    each = {"map": "${v}", "do": {"one": {"tool": "t"}}}
    plan = of({"v": {"tool": "t", "output": {}}, "each": each})
    bad: list[tuple[Any, str]] = [
        ([0] * 10_001, "`map` has 10,001 items, the limit is 10,000 items"),
        ("text", "`map` takes a list, this is string"),
    ]
    for value, why in bad:
        progress, _ = begin(plan)
        progress.finish(("v",), value)
        assert progress.failure == (("each",), why)
    progress, _ = begin(plan)
    progress.finish(("v",), [])
    assert progress.output() == {"each": []}


def test_a_field_that_is_not_there_fails_the_node_that_wants_it() -> None:
    nodes = {
        "v": {"tool": "t", "output": {}},
        "go": {"branch": "${v.x}", "cases": [{"equals": 1, "then": "a"}], "on_failure": "skip"},
        "a": {"tool": "t"},
    }
    progress, root = begin(of(nodes))
    progress.finish(("v",), {"y": 1})
    assert root.nodes["go"].status is NodeStatus.SKIPPED
    assert root.nodes["go"].error == "${v.x}: ${v} has no 'x'"
    assert root.nodes["a"].status is NodeStatus.SKIPPED


def test_graph_says_what_a_map_takes_from_around_it() -> None:
    inner = {"one": {"map": [1], "do": {"two": {"tool": "t", "arguments": {"of": "${a}"}}}}}
    graph = graph_of(of({"a": {"tool": "t"}, "each": {"map": [1], "do": inner}}))
    assert graph.needs["each"] == ("a",)
    assert graph.sinks == ("each",)
