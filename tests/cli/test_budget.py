"""The guide on budgets: its agents do what it says, word for word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from contracts.job import JobStatus
from contracts.llm_step import LLMStepInput, LLMStepResult
from tests.cli.stage import ROOT, CommandLine, Stage
from tests.workflows.peer import Reply, Script, calls, returns, says

NAMED = re.compile(r"^`(\w+\.\w+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
READER_SAYS = "Nothing new on pages 1 and 2."


@pytest.fixture
def guide(muster: CommandLine) -> str:
    """Write the guide's files where `muster` runs; return the guide."""
    text = (ROOT / "docs" / "guides" / "budgets.md").read_text()
    for name, body in NAMED.findall(text):
        Path(muster.directory / name).write_text(body)
    return text


def page(number: int) -> Reply:
    """Ask for a page."""
    return calls(("page", {"number": number}))


async def test_reader_stops_at_its_limit_with_the_answer_that_the_guide_shows(
    stage: Stage, muster: CommandLine, guide: str
) -> None:
    replies = [page(number) for number in range(1, 5)]
    answer = "Nothing new on pages 1 to 3."
    stage.peer.script = Script((*replies, says(answer)), tools={"page": returns("Nothing new.")})
    done = await muster.run("run", "reader.yaml", "Is anything new?")
    assert done.status == 1
    assert done.out.startswith(f"{answer}\n")
    shown = re.sub(r"job-[0-9a-z]+", "job-…", done.err)
    assert guide.count(f"{answer}\n…\n{shown[shown.index('error: ') :]}") == 1
    last = stage.peer.script.steps[-1]
    assert (last.output.tools, last.sampling.max_tokens) == ((), 100)
    job_id = done.err.split("muster show ")[1].split()[0]
    await stage.wait_for(job_id, JobStatus.STOPPED)
    rows = (await muster.run("jobs", "--state", "stopped", "--json")).json["jobs"]
    assert job_id in [row["job_id"] for row in rows]
    report = (await muster.run("show", job_id, "--json")).json
    assert (report["stop_reason"], report["tool_calls"]) == ("max_tool_calls", 3)


async def test_reader_that_is_called_has_what_is_left_of_its_callers_budget(
    stage: Stage, muster: CommandLine, guide: str
) -> None:
    editor = [calls(("reader", {"task": "What is new?"})), says("It is all as it was.")]
    reader = [page(1), page(2), page(3), says(READER_SAYS)]

    def reply(number: int) -> Reply:
        async def either(step: LLMStepInput) -> LLMStepResult:
            caller = stage.peer.script.steps[0].job_id
            return await (editor if step.job_id == caller else reader)[number](step)

        return either

    stage.peer.script = Script(
        [reply(number) for number in range(4)], tools={"page": returns("Nothing new.")}
    )
    done = await muster.run("run", "editor.yaml", "Is anything new?", "--json")
    assert done.status == 0, done
    told = stage.peer.script.steps[-1].append[-1].content
    assert told == f"{READER_SAYS}\n(It had to stop at its limit max_tool_calls.)"
    assert f"```text\n{told}\n```" in guide
    assert (done.json["tool_calls"], done.json["llm_steps"]) == (3, 6)
