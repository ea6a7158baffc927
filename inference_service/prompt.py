"""Messages to chat-template input, and generated text back to messages.

Models without a native tool format call tools by structured output: one JSON object that names the
tool and its arguments. The system message lists the tools, always all of them, so that the prompt's
prefix stays the same when the choice narrows; the grammar alone enforces what may be chosen now.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from pydantic import JsonValue
from pydantic_core import from_json, to_json

from contracts.agent import ToolSchema
from contracts.error import BadInputError, LimitExceededError, MusterError
from contracts.limit import MAX_ASSISTANT_BYTES
from contracts.llm_step import OutputForm
from contracts.message import Message, Role, ToolCall

Toolset = dict[str, ToolSchema]
ChatMessage = dict[str, str]


class InvalidOutputError(MusterError):
    """The model's text is not what the output form asks for; another sample may be."""

    retryable = True


def chat_messages(
    messages: Sequence[Message],
    toolset: Toolset,
    *,
    has_tool_role: bool = True,
    must_alternate: bool = False,
) -> list[ChatMessage]:
    """Return the chat template's input; tools are told at the end of the first system message.

    Where the template has no tool role, a tool's result is told as a user's message; where it wants
    user and assistant in turn, messages of one role that follow each other become one.
    """
    chat = [_chat_message(message, has_tool_role) for message in messages]
    if must_alternate:
        chat = _joined(chat)
    if toolset:
        told = _tool_list(toolset)
        if chat and chat[0]["role"] == Role.SYSTEM:
            chat[0]["content"] = f"{chat[0]['content']}\n\n{told}"
        else:
            chat.insert(0, {"role": Role.SYSTEM.value, "content": told})
    return chat


def output_schema(form: OutputForm, toolset: Toolset) -> dict[str, Any] | None:
    """Return the JSON schema that constrains the output, or None for free text.

    Raises `BadInputError` for a tool that the toolset does not hold, or a form that allows nothing.
    """
    if not form.tools:
        if not form.may_answer:
            raise BadInputError("the output form allows neither a tool call nor an answer")
        return form.json_schema
    definitions: dict[str, Any] = {}
    choices = [_call_schema(_tool(name, toolset), definitions) for name in form.tools]
    if form.max_calls > 1:
        calls = {
            "type": "array",
            "items": _any_of(choices),
            "minItems": 1,
            "maxItems": form.max_calls,
        }
        choices = [_object({"calls": calls})]
    if form.may_answer:
        answer = form.json_schema or {"type": "string"}
        choices.append(_object({"answer": _hoisted("answer", answer, definitions)}))
    schema = _any_of(choices)
    return schema | {"$defs": definitions} if definitions else schema


def parse_output(text: str, step_id: str, form: OutputForm, toolset: Toolset) -> Message:
    """Return the assistant message of a generated text; its `content` is for people to read.

    A tool call's content is the JSON as generated, an answer's is the answer alone. What the model
    itself reads again is neither: it is the sampled ids of the token run. Raises
    `InvalidOutputError`, or `LimitExceededError` for a message that Temporal would not take.
    """
    message = _parsed(text, step_id, form, toolset)
    size = len(to_json(message))
    if size > MAX_ASSISTANT_BYTES:
        raise LimitExceededError(
            f"the assistant message of LLM step {step_id!r}, with its tool calls, as JSON",
            size,
            MAX_ASSISTANT_BYTES,
            "bytes",
            hint="lower `sampling.max_tokens`, or let the tool take less in its arguments",
        )
    return message


def draft_text(text: str, form: OutputForm) -> str:
    """Return what people may read of a text that is still being generated.

    Of an answer as JSON that is the answer so far, of a tool call nothing. A character of which
    only some bytes are there is left out.
    """
    text = text.rstrip("\ufffd")
    if not form.tools:
        return text
    try:
        value = from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return ""
    answer = value.get("answer") if isinstance(value, dict) else None
    return answer if isinstance(answer, str) else ""


def _parsed(text: str, step_id: str, form: OutputForm, toolset: Toolset) -> Message:
    schema = output_schema(form, toolset)
    if schema is None:
        return Message(role=Role.ASSISTANT, content=text)
    value = _validated(text, schema)
    if not form.tools:
        return Message(role=Role.ASSISTANT, content=text)
    if "answer" in value:
        answer = value["answer"]
        content = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
        return Message(role=Role.ASSISTANT, content=content)
    calls = value["calls"] if form.max_calls > 1 else [value]
    return Message(
        role=Role.ASSISTANT,
        content=text,
        tool_calls=tuple(
            ToolCall(id=f"{step_id}/{number}", tool=call["tool"], arguments=call["arguments"])
            for number, call in enumerate(calls)
        ),
    )


def _chat_message(message: Message, has_tool_role: bool) -> ChatMessage:
    if message.role is Role.TOOL and not has_tool_role:
        return {"role": Role.USER.value, "content": f"Result of {message.tool}:\n{message.content}"}
    return {"role": message.role.value, "content": message.content}


def _joined(chat: Sequence[ChatMessage]) -> list[ChatMessage]:
    return [
        {"role": role, "content": "\n\n".join(message["content"] for message in same)}
        for role, same in groupby(chat, key=itemgetter("role"))
    ]


def _tool_list(toolset: Toolset) -> str:
    tools = toolset.values()
    lines = [f"- {t.name}({_signature(t.arguments)}): {t.description}" for t in tools]
    return "\n".join(["Tools:", *lines])


def _signature(schema: dict[str, JsonValue]) -> str:
    properties = schema.get("properties", {})
    assert isinstance(properties, dict), schema
    parts = []
    for name, prop in properties.items():
        kind = prop.get("type") if isinstance(prop, dict) else None
        parts.append(f"{name}: {kind}" if isinstance(kind, str) else name)
    return ", ".join(parts)


def _tool(name: str, toolset: Toolset) -> ToolSchema:
    try:
        return toolset[name]
    except KeyError:
        known = ", ".join(sorted(toolset)) or "none"
        raise BadInputError(
            f"the output form offers tool {name!r}, which the toolset does not hold",
            hint=f"tools of the toolset: {known}",
        ) from None


def _call_schema(tool: ToolSchema, definitions: dict[str, Any]) -> dict[str, Any]:
    arguments = _hoisted(tool.name, tool.arguments, definitions)
    return _object({"tool": {"const": tool.name}, "arguments": arguments})


def _hoisted(owner: str, schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Move a schema's `$defs` to the root's `definitions`, where its references are resolved."""
    prefix = "#/$defs/"

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: f"{prefix}{owner}.{item.removeprefix(prefix)}"
                if key == "$ref" and isinstance(item, str) and item.startswith(prefix)
                else moved(item)
                for key, item in value.items()
            }
        return [moved(item) for item in value] if isinstance(value, list) else value

    for name, definition in schema.get("$defs", {}).items():
        definitions[f"{owner}.{name}"] = moved(definition)
    own = moved({key: item for key, item in schema.items() if key != "$defs"})
    assert isinstance(own, dict)
    return own


def _any_of(choices: list[dict[str, Any]]) -> dict[str, Any]:
    return choices[0] if len(choices) == 1 else {"anyOf": choices}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _validated(text: str, schema: dict[str, Any]) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidOutputError(
            f"the model's output is not JSON ({error}): {text[:80]!r}",
            hint="raise `sampling.max_tokens`, so that the object is not cut off",
        ) from None
    # Of the choices that the schema leaves, the one that the output comes nearest to.
    wrong = best_match(Draft202012Validator(schema).iter_errors(value))
    if wrong is not None:
        raise InvalidOutputError(
            f"the model's output breaks its schema at {wrong.json_path}: {wrong.message[:200]}"
        )
    return value
