"""Plans on the command line: files, inputs, runs, what is shown, and another try."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.error import BadInputError
from contracts.plan import LLMNode, MapNode, Plan
from muster.plan_file import load_file, parse_plan
from muster.plan_job import next_try
from tests.cli.stage import CommandLine, Stage
from tests.plan.acting import MAX_STEPS, echoes
from tests.workflows.peer import Script, Tool, calls, raises, returns

PLAN = """\
name: trip
input:
  type: object
  properties:
    cities: {type: array, items: {type: string}}
  required: [cities]
tools:
  - wardrobe:find
limits:
  max_wall_time: 10m
nodes:
  each:
    map: ${input.cities}
    width: 2
    do:
      find:
        tool: find
        arguments: {what: "coat for ${item}"}
        timeout: 1m
      say:
        llm: "Say: ${find}"
        max_tokens: 32
  go:
    branch: ${each[0]}
    cases:
      - {equals: no, then: end}
      - {one_of: [a, b], then: other}
    otherwise: end
  end:
    llm: ${each}
  other:
    llm: Nothing.
"""
INPUT = '{"cities": ["Tunis", "Ghent"]}'


def test_plan_is_read_as_it_is_written(tmp_path: Path) -> None:
    plan = parse_plan(PLAN, "trip.yaml")
    each = plan.nodes["each"]
    assert isinstance(each, MapNode)
    assert isinstance(each.do["say"], LLMNode)
    assert plan.tools[0].function == "wardrobe:find"
    assert plan.limits.max_wall_time.total_seconds() == 600
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("llm: Nothing.", "llm: ${othr}", "trip.yaml:32: node 'other', `llm`: ${othr}: "),
        ("map: ${input.cities}", "map: ${input.city}", "trip.yaml:13: node 'each', `map`: "),
        ("tool: find\n", "tool: find\n        retrys: 3\n", "each.do.find.retrys: no such key"),
        ("llm: Nothing.", "says: Nothing.", "nodes.other: a node has exactly one of llm, tool"),
        ("width: 2", "width: 0", "trip.yaml:14: nodes.each.width: expected at least 1, got 0"),
        ("max_tokens: 32", "max_tokens: many", "max_tokens: expected a whole number, got 'many'"),
        ("- wardrobe:find", "- wardrobe:find\n  - a.b:find", "are named 'find'"),
        ("{equals: no, then: end}", "{then: end}", "a case says when it holds"),
        ("  other:\n", "  end:\n", "nodes.end: the key is already on line 29"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_told_with_its_line(old: str, new: str, message: str) -> None:
    assert old in PLAN
    with pytest.raises(BadInputError) as caught:
        parse_plan(PLAN.replace(old, new), "trip.yaml")
    assert message in caught.value.message


def test_file_without_nodes_is_an_agents(muster: CommandLine) -> None:
    spec = load_file(muster.agent, [muster.directory])
    assert not isinstance(spec, Plan)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{}", "trip.yaml:18: node 'each.find', `arguments`: it lacks 'what'"),
        ("{what: x, size: 3}", "`arguments`: it has 'size', which 'find' does not know: it knows"),
        ("{what: [x]}", "node 'each.find', `arguments.what`: it is not string but array"),
    ],
)
def test_arguments_that_a_tool_does_not_take_are_told_before_it_runs(
    muster: CommandLine, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    monkeypatch.syspath_prepend(muster.directory)
    path = muster.directory / "trip.yaml"
    path.write_text(PLAN.replace('{what: "coat for ${item}"}', arguments))
    with pytest.raises(BadInputError) as caught:
        load_file(path, [])
    assert message in caught.value.message


async def test_plan_runs_from_its_file_and_is_shown(stage: Stage, muster: CommandLine) -> None:
    (muster.directory / "trip.yaml").write_text(PLAN)
    stage.peer.script = Script((echoes,) * MAX_STEPS, tools={"find": returns("one coat")})
    done = await muster.run("run", "trip.yaml", INPUT)
    assert done.status == 0, done
    answer = '{"end":"<[\\"<Say: one coat>\\",\\"<Say: one coat>\\"]>","other":null}'
    assert done.out.splitlines()[0] == answer
    job_id = done.err.split()[1]
    shown = await muster.run("show", job_id)
    assert shown.status == 0, shown
    rows = [line.split() for line in shown.out.splitlines()]
    assert ["each", "map", "done", "2", "of", "2", "items"] in rows
    assert ["other", "llm", "skipped"] in rows
    assert "trip on scripted" in shown.out
    told = (await muster.run("show", job_id, "--json")).json
    assert told["plan"]["nodes"][0]["status"] == "done"
    assert (told["agent"], told["llm_steps"], told["tool_calls"]) == ("trip", 3, 2)
    listed = (await muster.run("jobs", "--agent", "trip", "--json")).json["jobs"]
    assert [row["job_id"] for row in listed] == [job_id]


async def test_wrong_input_of_a_plan_is_refused_before_it_starts(
    stage: Stage, muster: CommandLine
) -> None:
    (muster.directory / "trip.yaml").write_text(PLAN)
    for given, message in (
        ("Tunis", "the input of plan 'trip' is no JSON"),
        ("[]", "the input of plan 'trip' is no JSON object"),
        ("{}", "plan 'trip': the input lacks 'cities'"),
        ('{"cities": [1]}', "the input.cities[0] is not string but integer"),
    ):
        assert message in await muster.refused("run", "trip.yaml", given)


async def test_wrong_tool_of_a_plan_is_refused_before_it_starts(
    stage: Stage, muster: CommandLine
) -> None:
    (muster.directory / "trip.yaml").write_text(
        PLAN.replace(":find", ":search").replace("tool: find", "tool: search")
    )
    refused = await muster.refused("run", "trip.yaml", INPUT)
    assert "trip.yaml:8: tools[0].function: " in refused


async def test_failed_plan_is_retried_in_a_new_job(stage: Stage, muster: CommandLine) -> None:
    (muster.directory / "trip.yaml").write_text(PLAN)
    broken: dict[str, Tool] = {"find": raises("the wardrobe is locked")}
    stage.peer.script = Script((echoes,) * MAX_STEPS, tools=broken)
    done = await muster.run("run", "trip.yaml", INPUT)
    assert done.status == 1
    job_id = done.err.split()[1]
    assert "node 'each' failed: each[" in done.err
    assert f"muster retry {job_id}" in done.err
    stage.peer.script = Script((echoes,) * MAX_STEPS, tools={"find": returns("one coat")})
    again = await muster.run("retry", job_id, "--json")
    assert again.status == 0, again
    assert again.json["job_id"] == f"{job_id}-try2"
    assert f"job {job_id}-try2 exists already" in await muster.refused("retry", job_id)
    assert again.json["answer"].startswith('{"end":"<[')
    assert "only what has not come to its end" in await muster.refused(
        "retry", again.json["job_id"]
    )


def test_each_try_has_an_id_of_its_own() -> None:
    assert next_try("job-a") == "job-a-try2"
    assert next_try("job-a-try2") == "job-a-try3"
    assert next_try("job-a-tryout") == "job-a-tryout-try2"


async def test_job_of_an_agent_cannot_be_retried(stage: Stage, muster: CommandLine) -> None:
    broken: dict[str, Tool] = {"find": raises("no")}
    text = muster.agent.read_text() + "    on_failure: fail_job\n"
    muster.agent.write_text(text)
    stage.peer.script = Script((calls(("find", {})),), tools=broken)
    done = await muster.run("run", "weather.yaml", "Berlin", "--json")
    refused = await muster.refused("retry", done.json["job_id"])
    assert "is no plan's" in refused
