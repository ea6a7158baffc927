"""What an MCP server answers, as the text that the model reads."""

from __future__ import annotations

from typing import Any

import pytest
from mcp_types import CallToolResult

from activities.mcp.answer import answer_of
from activities.tool import ModelFaultError


def _answer(*texts: str, structured: Any = None, is_error: bool = False) -> str:
    content = [{"type": "text", "text": text} for text in texts]
    given = {"content": content, "structuredContent": structured, "isError": is_error}
    return answer_of(CallToolResult.model_validate(given))


@pytest.mark.parametrize(
    ("texts", "structured", "told"),
    [
        (["one", "two"], None, "one\ntwo"),
        ([], None, ""),
        ([], {"a": "ü"}, '{"a":"ü"}'),
        (["A is 1."], {"a": 1}, 'A is 1.\n{"a":1}'),
        (['{\n  "a": 1\n}'], {"a": 1}, '{\n  "a": 1\n}'),
        (["Ada"], {"result": "Ada"}, "Ada"),
        (["7"], {"result": 7}, "7"),
        (["1, 2"], [1, 2], "1, 2\n[1,2]"),
        (["true"], {"result": 1}, 'true\n{"result":1}'),
        (["null"], {"a": 1}, 'null\n{"a":1}'),
        (["[1,2]"], {"result": [1, 2]}, "[1,2]"),
        (["[" * 100_000], {"a": 1}, "[" * 100_000 + '\n{"a":1}'),
    ],
)
def test_structured_content_is_told_unless_the_text_repeats_it(
    texts: list[str], structured: Any, told: str
) -> None:
    assert _answer(*texts, structured=structured) == told


def test_no_of_a_tool_is_its_text_or_says_that_there_is_none() -> None:
    with pytest.raises(ModelFaultError, match=r"^no such customer$"):
        _answer("no such customer", is_error=True)
    with pytest.raises(ModelFaultError, match="does not say why"):
        _answer(is_error=True)
