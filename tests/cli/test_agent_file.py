"""An agent file that is wrong is answered with one line: file, line, key, what, and a hint."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest

from contracts.agent import AgentSpec, OnFailure
from contracts.error import BadInputError, LimitExceededError
from contracts.limit import MAX_AGENT_FILE_BYTES, MAX_TOOLS
from contracts.message import Role
from muster.agent_file import load_agent, parse_agent, read_agent_file
from muster.yaml_tree import FileValueError

HEAD = "name: weather\ninstructions: Say what to wear.\n"


def agent(text: str) -> AgentSpec:
    """Return the agent of an agent file's text."""
    return parse_agent(text, "agent.yaml").spec


def refused(text: str) -> FileValueError:
    """Return how an agent file's text is refused; always one line, with a hint."""
    with pytest.raises(FileValueError) as caught:
        parse_agent(text, "agent.yaml")
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


def test_every_part_of_an_agent_can_be_written_in_yaml() -> None:
    spec = agent(
        """
name: clerk
instructions: |
  Serve the customer.
model: smollm2
tools:
  - shop.tools:find
  - function: shop.tools:buy
    name: purchase
    after: [find]
    max_calls: 1
    timeout: 90
    queue_timeout: 1h30m
    retry: {max_attempts: 2, initial_interval: 500ms, max_interval: 10s, backoff: 1.5}
    on_failure: fail_job
answer_after: [purchase]
max_parallel_tool_calls: 2
examples:
  - user: Two apples
  - assistant: '{"tool": "find", "arguments": {"what": "apples"}}'
  - tool: 3 apples left
  - role: assistant
    content: ""
    tool_calls:
      - id: c1
        tool: find
        arguments: {what: apples, count: 2, ripe: true, price: 1.5, note: null, size: "2"}
sampling: {temperature: 0.5, seed: null}
limits:
  max_turns: 4
  max_wall_time: 10m
"""
    )
    find, buy = spec.tools
    assert (find.tool_name, buy.tool_name) == ("find", "purchase")
    assert buy.timeout == timedelta(seconds=90)
    assert buy.queue_timeout == timedelta(hours=1, minutes=30)
    assert buy.retry.initial_interval == timedelta(milliseconds=500)
    assert buy.on_failure is OnFailure.FAIL_JOB
    assert [message.role for message in spec.examples[:3]] == [
        Role.USER,
        Role.ASSISTANT,
        Role.TOOL,
    ]
    assert spec.examples[2].tool == "find"
    assert spec.examples[3].tool_calls[0].arguments == {
        "what": "apples", "count": 2, "ripe": True, "price": 1.5, "note": None, "size": "2",
    }  # fmt: skip
    assert spec.sampling.seed is None
    assert spec.limits.max_wall_time == timedelta(minutes=10)


def test_text_stays_text_whatever_yaml_would_make_of_it() -> None:
    spec = agent("name: no\ninstructions: 2026-01-01\nexamples:\n  - user: yes\n  - user: 0x10\n")
    assert (spec.name, spec.instructions) == ("no", "2026-01-01")
    assert [message.content for message in spec.examples] == ["yes", "0x10"]


@pytest.mark.parametrize(
    ("text", "line", "says", "hints"),
    [
        (HEAD + "tols: []", 3, "tols: no such key", "did you mean 'tools'?"),
        (HEAD + "Tools: []", 3, "Tools: no such key", "did you mean 'tools'?"),
        (HEAD + "xyzzy: 1", 3, "xyzzy: no such key", "the keys here are name, instructions"),
        (HEAD + "limits:\n  max-turns: 3", 4, "limits.max-turns", "did you mean 'max_turns'?"),
        (HEAD + "tools:\n  - function: m:f\n    timout: 3s", 5, "tools[0].timout", "'timeout'"),
        (HEAD + "examples:\n  - usr: hi", 4, "examples[0].usr", "did you mean 'user'?"),
        (HEAD + "name: again", 3, "name: the key is already on line 1", "keep one"),
        (HEAD + "<<: {name: x}", 3, "<<: no such key", "the keys here are"),
        ("instructions: hi", 1, "the key 'name' is missing", "name: ..."),
        ("name: a\ninstructions:", 2, "expected text, got nothing", "after the `:`"),
        ("name: a\ninstructions: ''", 2, "expected text, got nothing", "instructions"),
        ("name: a\ninstructions: {do: it}", 2, "expected text, got a mapping", "quotes"),
        ("name: a\ninstructions: [do, it]", 2, "expected text, got a list", "quotes"),
        ("name: 2x\ninstructions: a", 1, "name: expected a name, got '2x'", "starts with a letter"),
        (HEAD + "limits: {max_turns: 0}", 3, "limits.max_turns: expected at least 1, got 0", ""),
        (HEAD + "limits: {max_turns: no}", 3, "expected a whole number, got 'no'", ""),
        (HEAD + "limits: {max_turns: 2.5}", 3, "expected a whole number, got '2.5'", ""),
        (HEAD + "limits: hot", 3, "limits: expected a mapping", "key: value"),
        (HEAD + "sampling:\n  temperature: 3", 4, "expected at most 2.0, got 3.0", ""),
        (HEAD + "sampling: {seed: 99999999999999999999}", 3, "expected at most 4294967295", ""),
        (HEAD + "sampling:\n  temperature: .nan", 4, "expected a number, got '.nan'", ""),
        (HEAD + "limits: {max_wall_time: '1:30'}", 3, "expected a duration, got '1:30'", "1h30m"),
        (HEAD + "limits: {max_wall_time: 0s}", 3, "expected a duration, got '0s'", "above 0"),
        (HEAD + "limits: {max_wall_time: -5}", 3, "expected a duration, got '-5'", "above 0"),
        (HEAD + "limits: {max_wall_time: 5m1h}", 3, "expected a duration, got '5m1h'", "1h30m"),
        (HEAD + "limits: {max_wall_time: 9999d}", 3, "expected a duration", "at most 366 days"),
        (HEAD + "tools: m:f", 3, "tools: expected a list, got 'm:f'", "- function: ..."),
        (HEAD + "tools:\n  - m", 4, "expected an import path, got 'm'", "package.module:function"),
        (HEAD + "tools:\n  - m:f\n  - n:f", 5, "a tool is already named 'f' on line 4", "`name`"),
        (HEAD + "tools:\n  - function: m:f\n    on_failure: fail-job", 5,
         "expected 'tell_model' or", "did you mean 'fail_job'?"),
        (HEAD + "tools:\n  - m:find\n  - function: m:buy\n    after:\n      - fnd", 7,
         "tools[1].after[0]: 'fnd' is not another tool", "did you mean 'find'?"),
        (HEAD + "tools:\n  - function: m:f\n    after: [f]", 5, "'f' is not another tool", ""),
        (HEAD + "answer_after: [f]", 3, "answer_after[0]: 'f' is not another tool", ""),
        (HEAD + "tools:\n  - {function: m:f, after: [g]}\n  - {function: m:g, after: [f]}", 4,
         "tools wait for each other: f <- g <- f", "`after`"),
        (HEAD + "examples:\n  - user: hi\n  - tool: x", 5, "examples[1]: a tool's message does not",
         "`role: tool`"),
        (HEAD + "examples:\n  - user: {a: 1}", 4, "expected the message's text", "quotes"),
        (HEAD + "examples:\n  - role: user", 4, "the key 'content' is missing", "content: ..."),
        (HEAD + "? [a]\n: b", 3, "expected a key, got a list", ""),
    ],
)  # fmt: skip
def test_wrong_value_is_named_with_line_key_and_hint(
    text: str, line: int, says: str, hints: str
) -> None:
    error = refused(text)
    assert error.message.startswith(f"agent.yaml:{line}: ")
    assert says in error.message
    assert hints in error.hint


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the file is empty"),
        ("# nothing yet\n", "the file is empty"),
        ("null", "expected a mapping"),
        ("- name: a", "expected a mapping (`key: value`), got a list"),
        ("weather", "expected a mapping (`key: value`), got 'weather'"),
        ("name: [", "not YAML"),
        (HEAD + "\tmodel: x", "a tab stands where YAML wants spaces"),
        (HEAD + "model: x: y", "a second `:` on one line"),
        (HEAD + "---\nname: b", "a second YAML document"),
        ("name: !!python/object/apply:os.system [ls]", "tag"),
        ("a: &a [x]\nb: *a", "alias *a is not allowed"),
        ("a: &a [*a]", "alias *a is not allowed"),
        ("x: " + "[" * 200, "nested deeper than 24 levels"),
        ("instructions: a\x07b", "the character '\\x07' is not allowed"),
    ],
)
def test_file_that_is_no_agent_is_refused(text: str, says: str) -> None:
    assert says in refused(text).message


def test_alias_bomb_is_refused_before_it_is_built() -> None:
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    assert "alias" in refused("a0: &a0 [lol]\n" + "\n".join(levels)).message


def test_too_many_tools_are_refused() -> None:
    tools = "".join(f"  - m:f{n}\n" for n in range(MAX_TOOLS + 1))
    assert f"expected at most {MAX_TOOLS} items" in refused(f"{HEAD}tools:\n{tools}").message


def test_missing_file_suggests_the_one_that_was_meant(tmp_path: Path) -> None:
    (tmp_path / "weather.yaml").write_text(HEAD)
    with pytest.raises(BadInputError, match="no agent file") as caught:
        read_agent_file(tmp_path / "wether.yaml")
    assert str(tmp_path / "weather.yaml") in caught.value.hint


@pytest.mark.parametrize("name", ["nowhere/agent.yaml", "", "a\0b", "x" * 5_000])
def test_path_that_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInputError) as caught:
        read_agent_file(tmp_path / name)
    assert caught.value.hint


def test_directory_lists_its_agent_files(tmp_path: Path) -> None:
    (tmp_path / "weather.yaml").write_text(HEAD)
    with pytest.raises(BadInputError, match="is a directory") as caught:
        read_agent_file(tmp_path)
    assert "weather.yaml" in caught.value.hint


def test_pipe_and_device_are_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(BadInputError, match="not a regular file"):
            read_agent_file(path)


def test_file_that_is_too_big_is_refused_with_its_size(tmp_path: Path) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text(HEAD + "#" * MAX_AGENT_FILE_BYTES)
    with pytest.raises(LimitExceededError, match="limit is 256,000 bytes"):
        read_agent_file(path)


def test_file_that_is_not_utf8_is_refused_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "agent.yaml"
    path.write_bytes(b"name: caf\n# caf\xe9\n")
    with pytest.raises(FileValueError, match=r"agent.yaml:2: byte 0xe9 is not UTF-8"):
        read_agent_file(path)


def test_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    path = tmp_path / "agent.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + HEAD.encode())
    assert read_agent_file(path).spec.name == "weather"


SUB = """\
name: finder
instructions: Find things.
tools: [shop:find]
"""


def write(directory: Path, **files: str) -> Path:
    """Write agent files and return the first one's path."""
    for name, text in files.items():
        (directory / f"{name}.yaml").write_text(text)
    return directory / f"{next(iter(files))}.yaml"


def test_sub_agent_is_a_file_beside_its_callers(tmp_path: Path) -> None:
    text = HEAD + "agents:\n  - file: finder.yaml\n    description: Finds things.\n"
    agent = read_agent_file(write(tmp_path, caller=text, finder=SUB))
    [sub_agent] = agent.spec.agents
    assert (sub_agent.name, sub_agent.agent.name) == ("finder", "finder")
    assert [tool.tool_name for tool in sub_agent.agent.tools] == ["find"]
    text += "    name: helper\n    max_calls: 2\nanswer_after: [helper]\n"
    agent = read_agent_file(write(tmp_path, caller=text, finder=SUB))
    assert (agent.spec.agents[0].name, agent.spec.agents[0].max_calls) == ("helper", 2)


@pytest.mark.parametrize(
    ("files", "where", "problem"),
    [
        ({"a": "  - description: x\n"}, "a.yaml:4: agents[0].file:", "expected the file"),
        ({"a": "  - file: no.yaml\n    description: x\n"}, "a.yaml:4: agents[0].file:", "no agent"),
        ({"a": "  - file: b.yaml\n", "b": ""}, "a.yaml:4: agents[0]:", "'description' is missing"),
        (
            {"a": "  - file: a.yaml\n    description: x\n"},
            "a.yaml:4: agents[0].file:",
            "agents call each other: a.yaml <- a.yaml",
        ),
        (
            {
                "a": "  - file: b.yaml\n    description: x\n",
                "b": "  - file: a.yaml\n    description: x\n",
            },
            "b.yaml:4: agents[0].file:",
            "agents call each other: a.yaml <- b.yaml <- a.yaml",
        ),
        (
            {
                "a": "  - file: b.yaml\n    description: x\n",
                "b": "  - file: c.yaml\n    description: x\n",
                "c": "  - file: d.yaml\n    description: x\n",
                "d": "",
            },
            "c.yaml:4: agents[0].file:",
            "4 levels deep, the limit is 3",
        ),
        (
            {
                "a": "  - file: b.yaml\n    description: x\n  - file: b.yaml\n    description: y\n",
                "b": "",
            },
            "a.yaml:",
            "a tool is already named 'b'",
        ),
    ],
)
def test_wrong_sub_agent_is_one_error_with_file_and_line(
    tmp_path: Path, files: dict[str, str], where: str, problem: str
) -> None:
    texts = {
        name: f"name: {name}\ninstructions: Serve.\n" + (f"agents:\n{text}" if text else "")
        for name, text in files.items()
    }
    with pytest.raises(FileValueError) as caught:
        read_agent_file(write(tmp_path, **texts))
    assert str(caught.value).startswith(f"{tmp_path}/{where}"), str(caught.value)
    assert problem in str(caught.value)
    assert caught.value.hint


def test_error_in_a_sub_agents_file_names_that_file(tmp_path: Path) -> None:
    text = HEAD + "agents:\n  - file: finder.yaml\n    description: x\n"
    path = write(tmp_path, caller=text, finder=SUB + "limits: {max_turns: 0}\n")
    with pytest.raises(FileValueError, match=r"finder.yaml:4: limits.max_turns: expected"):
        read_agent_file(path)
    write(tmp_path, finder=SUB)
    with pytest.raises(
        FileValueError, match=r"finder.yaml:3: tools\[0\].function: tool 'shop:find'"
    ):
        load_agent(path, [])


def test_an_example_that_refers_to_a_stored_text_is_refused() -> None:
    blob = f"{{digest: {'a' * 64}, bytes: 3}}"
    error = refused(f"{HEAD}examples:\n  - role: user\n    content: hi\n    blob: {blob}\n")
    assert "an example has its text in `content`" in error.message
