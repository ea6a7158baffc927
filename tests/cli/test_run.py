"""`muster run` prints an answer, tells how a job ended, and leaves a job running on Ctrl-C."""

from __future__ import annotations

import pytest

from contracts.job import JobStatus
from tests.cli.stage import CommandLine, Stage
from tests.workflows.peer import Gate, Script, calls, raises, returns, says

KEYS = [
    "job_id", "status", "answer", "turns", "llm_steps", "tool_calls", "usage", "wall_s", "time",
]  # fmt: skip

NEEDS_TOOL = calls(("find", {"what": "coat"}))


async def test_run_prints_answer_time_and_link(stage: Stage, muster: CommandLine) -> None:
    stage.peer.script = Script((NEEDS_TOOL, says("Wear a coat.")), tools={"find": returns("one")})
    done = await muster.run("run", "weather.yaml", "Berlin")
    assert done.status == 0, done
    assert done.out.startswith("Wear a coat.\n")
    for part in ("orchestration", "ready_wait", "prefill", "decode", "tools", "wall"):
        assert part in done.out
    assert "job job-" in done.err


async def test_json_is_one_object_with_the_promised_keys(stage: Stage, muster: CommandLine) -> None:
    stage.peer.script = Script((NEEDS_TOOL, says("Wear ünï.")), tools={"find": returns("one")})
    done = await muster.run("run", "weather.yaml", "-", "--json", stdin=b"Berlin")
    assert done.status == 0, done
    assert done.err == ""
    assert list(done.json) == KEYS
    assert done.json["answer"] == "Wear ünï."
    assert done.json["status"] == "completed"
    assert (done.json["turns"], done.json["llm_steps"], done.json["tool_calls"]) == (2, 2, 1)
    assert done.json["usage"] == {
        "prompt_tokens": 200, "cached_tokens": 80, "completion_tokens": 20,
    }  # fmt: skip
    assert done.json["time"]["decode_s"] == pytest.approx(1.0)
    assert stage.peer.script.steps[0].append[-1].content == "Berlin"


async def test_detached_job_is_shown_later(stage: Stage, muster: CommandLine) -> None:
    stage.peer.script = Script((says("A coat."),))
    job_id = (await muster.run("run", "weather.yaml", "Berlin", "--detach")).out.strip()
    assert job_id.startswith("job-")
    done = await muster.run("show", job_id, "--wait")
    assert done.status == 0, done
    assert "A coat." in done.out


async def test_ctrl_c_leaves_the_job_running(stage: Stage, muster: CommandLine) -> None:
    gate = Gate()
    stage.peer.script = Script((gate.step(says("Later.")),))
    program = await muster.start("run", "weather.yaml", "Berlin")
    await program.error_line("LLM step")
    program.interrupt()
    done = await program.end()
    assert done.status == 130
    assert done.out == ""
    job_id = done.err.split("muster show ")[1].split()[0]
    assert (await stage.jobs.describe(job_id)).status is JobStatus.RUNNING
    gate.opened.set()
    assert (await muster.run("show", job_id, "--wait", "--json")).json["answer"] == "Later."


async def test_stopped_job_names_the_limit_and_the_key_to_raise(
    stage: Stage, muster: CommandLine
) -> None:
    text = muster.agent.read_text() + "limits:\n  max_turns: 1\n"
    muster.agent.write_text(text + "  last_answer_tokens: 0\n")
    stage.peer.script = Script((NEEDS_TOOL,), tools={"find": returns("one")})
    done = await muster.run("run", "weather.yaml", "Berlin", "--json")
    assert done.status == 1
    assert (done.json["status"], done.json["answer"]) == ("stopped", None)
    assert "stopped without an answer: it reached its limit on turns" in done.err
    assert "limits.max_turns" in done.err
    muster.agent.write_text(text)
    stage.peer.script = Script((NEEDS_TOOL, says("One, so far.")), tools={"find": returns("one")})
    done = await muster.run("run", "weather.yaml", "Berlin")
    assert done.status == 1
    assert done.out.startswith("One, so far.\n")
    assert "stopped with a last answer: it reached its limit on turns" in done.err
    shown = await muster.run("show", done.err.split("muster show ")[1].split()[0])
    assert "last answer" in shown.out


async def test_failed_job_shows_its_cause(stage: Stage, muster: CommandLine) -> None:
    muster.agent.write_text(muster.agent.read_text() + "    on_failure: fail_job\n")
    broken = raises("the wardrobe is locked", "find the key")
    stage.peer.script = Script((NEEDS_TOOL,), tools={"find": broken})
    done = await muster.run("run", "weather.yaml", "Berlin", "--json")
    assert done.status == 1
    assert done.json["status"] == "failed"
    assert "the wardrobe is locked" in done.err
    assert "find the key" in done.err


@pytest.mark.parametrize(("how", "says_it"), [("cancel", "cancelled"), ("terminate", "terminated")])
async def test_job_ended_by_others_is_told_apart(
    stage: Stage, muster: CommandLine, how: str, says_it: str
) -> None:
    gate = Gate()
    stage.peer.script = Script((gate.step(says("never")),))
    program = await muster.start("run", "weather.yaml", "Berlin")
    started = await program.error_line("job job-")
    await program.error_line("LLM step")
    handle = stage.client.get_workflow_handle(started.split()[1])
    await (handle.cancel() if how == "cancel" else handle.terminate("by the operator"))
    done = await program.end()
    assert done.status == 1
    assert f"was {says_it}" in done.err


async def test_progress_says_that_no_worker_is_there(stage: Stage, muster: CommandLine) -> None:
    stage.peer.script = Script((says("At last."),))
    await stage.stop_agents()
    program = await muster.start("run", "weather.yaml", "Berlin")
    await program.error_line("waiting for an agent worker")
    await stage.start_agents()
    done = await program.end()
    assert done.status == 0, done
    assert done.out.startswith("At last.")


async def test_answer_cannot_steer_the_terminal(stage: Stage, muster: CommandLine) -> None:
    stage.peer.script = Script((says("\x1b[31mred\x07"),))
    done = await muster.run("run", "weather.yaml", "Berlin")
    assert done.status == 0
    assert "\x1b" not in done.out
    assert "\x07" not in done.out


@pytest.mark.parametrize(
    ("arguments", "says_it"),
    [
        (("missing.yaml", "Berlin"), "no agent file 'missing.yaml'"),
        (("wether.yaml", "Berlin"), "weather.yaml"),
        (("weather.yaml", ""), "the input is empty"),
        (("weather.yaml", "-"), "the input is empty"),
        (("weather.yaml", "@missing.txt"), "input file 'missing.txt' cannot be read"),
        (("weather.yaml", "Berlin", "--tenant", ""), "tenant"),
    ],
)
async def test_bad_argument_is_one_line_and_a_hint(
    muster: CommandLine, arguments: tuple[str, ...], says_it: str
) -> None:
    assert says_it in await muster.refused("run", *arguments)


async def test_wrong_key_is_one_line_and_a_hint(muster: CommandLine) -> None:
    muster.agent.write_text("name: weather\ninstrctions: x\n")
    err = await muster.refused("run", "weather.yaml", "Berlin", "--json")
    assert "weather.yaml:2: instrctions: no such key" in err
    assert "did you mean 'instructions'?" in err


async def test_five_megabytes_of_input_are_one_line_and_a_hint(muster: CommandLine) -> None:
    (muster.directory / "big.txt").write_bytes(b"x" * 5_000_000)
    err = await muster.refused("run", "weather.yaml", "@big.txt")
    assert "5,000,000 bytes, the limit is 1,000,000 bytes" in err


@pytest.mark.parametrize(
    ("function", "module", "says_it"),
    [
        ("nowhere:find", "", "nowhere"),
        ("wardrobe:lost", "x = 1\n", "lost"),
        ("wardrobe:find", "find = 3\n", "find"),
        ("wardrobe:find", "def find(what):\n    return 1\n", "what"),
        ("wardrobe:find", "def find(what: str = object()) -> str:\n    return 'x'\n", "what"),
        ("wardrobe:find", "def find(*what: str) -> str:\n    return 'x'\n", "what"),
        ("wardrobe:find", "raise RuntimeError('broken')\n", "broken"),
        ("wardrobe:find", "def find(:\n", "wardrobe"),
    ],
)
async def test_tool_that_cannot_be_used_is_one_line_with_its_place(
    muster: CommandLine, function: str, module: str, says_it: str
) -> None:
    (muster.directory / "wardrobe.py").write_text("print('imported')\n" + module)
    muster.agent.write_text(f"name: w\ninstructions: x\ntools:\n  - {function}\n")
    done = await muster.run("run", "weather.yaml", "Berlin", "--json")
    assert (done.status, done.out) == (1, "")
    [error] = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert "weather.yaml:4: tools[0].function: " in error
    assert says_it in error
    assert "hint: " in done.err


async def test_stack_that_is_not_up_is_one_line_and_a_hint(muster: CommandLine) -> None:
    err = await muster.refused("run", "weather.yaml", "x", MUSTER_TEMPORAL_ADDRESS="127.0.0.1:1")
    assert "127.0.0.1:1" in err
    assert "muster up" in err
