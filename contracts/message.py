"""The conversation: messages, tool calls, and the reference that names a stored conversation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sized
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue
from pydantic_core import to_json


class Frozen(BaseModel):
    """Base of all contracts: immutable, and a key nobody declared is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Role(StrEnum):
    """Who speaks, in the words of chat templates."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ToolCall(Frozen):
    """One call the model asked for; `id` is stable over replays and is the idempotency key."""

    id: str
    tool: str
    arguments: dict[str, JsonValue]


class BlobRef(Frozen):
    """Names a text that the store keeps: its content hash, and its size as JSON, in bytes."""

    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)


def is_none(value: object) -> bool:
    """Say whether a field is left out of what is written: without it, old hashes hold."""
    return value is None


def is_false(value: bool) -> bool:
    """Say whether a flag is left out of what is written, for the same reason."""
    return not value


def is_empty(value: Sized) -> bool:
    """Say whether a collection is left out of what is written."""
    return len(value) == 0


class Message(Frozen):
    """One message of a conversation.

    An assistant message keeps the text exactly as generated in `content`; `tool_calls` is what was
    parsed from it. A tool message answers the call `tool_call_id` of the tool named `tool`. With a
    `blob`, that is the text, which the model reads whole, and `content` is a preview for people.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    tool: str | None = None
    blob: BlobRef | None = Field(None, exclude_if=is_none)


class ContextRef(Frozen):
    """Names a stored conversation: the hash of its last message, and the token run that made it.

    `token_run` is the id of the LLM step whose tokens end the conversation: equal text can have
    different sampled tokens, so the text's hash alone does not name them. It is None while no
    model has spoken.
    """

    head: str
    token_run: str | None = None


def content_hash(value: Any) -> str:
    """Return the hex SHA-256 of a JSON-able value's canonical form (keys sorted, no spaces)."""
    canonical = json.dumps(
        json.loads(to_json(value)), sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )
    return hashlib.sha256(canonical.encode()).hexdigest()


def node_hash(parent: str | None, message: Message) -> str:
    """Return the hash that names `message` after the conversation that ends in `parent`."""
    return content_hash({"parent": parent, "message": message.model_dump(mode="json")})
