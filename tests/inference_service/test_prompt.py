"""Prompts and outputs: what the model may say, and what is made of it."""

from __future__ import annotations

import json

import pytest

from contracts.agent import ToolSchema
from contracts.error import BadInputError
from contracts.llm_step import OutputForm
from contracts.message import Message, Role, ToolCall
from inference_service.prompt import (
    InvalidOutputError,
    chat_messages,
    output_schema,
    parse_output,
)


def tool(name: str, **properties: object) -> ToolSchema:
    return ToolSchema.model_validate(
        {
            "name": name,
            "description": f"Does {name}.",
            "arguments": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            },
        }
    )


TOOLS = {
    "search": tool("search", query={"type": "string"}),
    "read": tool("read", document={"type": "string"}, page={"type": "integer"}),
}
CHOICE = OutputForm(tools=("search", "read"))


def parse(value: object, form: OutputForm) -> Message:
    return parse_output(json.dumps(value), "job-1/b/0", form, TOOLS)


def test_tools_are_told_at_the_end_of_the_system_message() -> None:
    system = Message(role=Role.SYSTEM, content="Be brief.")
    (chat,) = chat_messages([system], TOOLS)
    assert chat["role"] == "system"
    assert chat["content"].startswith("Be brief.\n\n")
    assert "search(query: string): Does search." in chat["content"]


def test_the_prompt_does_not_change_when_the_choice_narrows() -> None:
    narrow, wide = OutputForm(tools=("read",)), CHOICE
    assert output_schema(narrow, TOOLS) != output_schema(wide, TOOLS)
    user = Message(role=Role.USER, content="Hi")
    assert "search" in chat_messages([user], TOOLS)[0]["content"]


def test_free_text_has_no_schema() -> None:
    assert output_schema(OutputForm(), TOOLS) is None
    assert parse_output("Any text {", "s", OutputForm(), TOOLS).content == "Any text {"


def test_a_call_is_parsed_with_a_stable_id() -> None:
    message = parse({"tool": "search", "arguments": {"query": "x"}}, CHOICE)
    assert message.tool_calls == (
        ToolCall(id="job-1/b/0/0", tool="search", arguments={"query": "x"}),
    )


def test_several_calls_keep_their_order_and_get_their_own_ids() -> None:
    form = OutputForm(tools=("search",), max_calls=3)
    calls = [{"tool": "search", "arguments": {"query": q}} for q in "ab"]
    message = parse({"calls": calls}, form)
    assert [(c.id, c.arguments["query"]) for c in message.tool_calls] == [
        ("job-1/b/0/0", "a"),
        ("job-1/b/0/1", "b"),
    ]


def test_an_answer_beside_tools_is_given_as_plain_text() -> None:
    message = parse({"answer": "42"}, CHOICE)
    assert (message.content, message.tool_calls) == ("42", ())


def test_a_structured_answer_follows_its_schema() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = OutputForm.model_validate({"json_schema": schema})
    assert parse({"n": 1}, form).content == '{"n": 1}'
    with pytest.raises(InvalidOutputError, match=r"breaks its schema at \$.n"):
        parse({"n": "one"}, form)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"tool": "search", "argum', "not JSON"),
        ('{"tool": "delete", "arguments": {}}', "schema"),
        ('{"tool": "search", "arguments": {"query": 1}}', "schema"),
        ('{"tool": "search", "arguments": {"query": "a", "more": 1}}', "schema"),
        ("[]", "schema"),
        ("", "not JSON"),
        ("NaN", "schema"),
    ],
)
def test_an_output_that_is_not_the_form_is_retryable(text: str, why: str) -> None:
    with pytest.raises(InvalidOutputError, match=why) as caught:
        parse_output(text, "s", CHOICE, TOOLS)
    assert caught.value.retryable


def test_an_answer_is_refused_when_it_may_not_be_given() -> None:
    with pytest.raises(InvalidOutputError):
        parse({"answer": "42"}, OutputForm(tools=("search",), may_answer=False))


def test_a_form_that_allows_nothing_or_an_unknown_tool_is_bad_input() -> None:
    with pytest.raises(BadInputError, match="neither"):
        output_schema(OutputForm(may_answer=False), TOOLS)
    with pytest.raises(BadInputError, match="'fly'"):
        output_schema(OutputForm(tools=("fly",)), TOOLS)


def test_definitions_of_two_tools_with_one_name_do_not_mix() -> None:
    def with_definition(name: str, kind: str) -> ToolSchema:
        return ToolSchema.model_validate(
            {
                "name": name,
                "description": "",
                "arguments": {
                    "type": "object",
                    "properties": {"x": {"$ref": "#/$defs/Thing"}},
                    "required": ["x"],
                    "$defs": {"Thing": {"type": kind}},
                },
            }
        )

    tools = {"one": with_definition("one", "integer"), "two": with_definition("two", "string")}
    form = OutputForm(tools=("one", "two"))
    ok = {"tool": "two", "arguments": {"x": "text"}}
    assert parse_output(json.dumps(ok), "s", form, tools).tool_calls[0].tool == "two"
    with pytest.raises(InvalidOutputError):
        parse_output(json.dumps(ok | {"tool": "one"}), "s", form, tools)
