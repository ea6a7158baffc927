"""What an MCP server answers, as text for the model."""

from __future__ import annotations

import json
from typing import Any

from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
)

from activities.tool import ModelFaultError


def answer_of(result: CallToolResult) -> str:
    """Return a result as text; raises ModelFaultError with the text if the tool says no.

    Structured content that the text does not repeat follows it as JSON. What is no text is named,
    with its type and size.
    """
    parts = [_text(block) for block in result.content]
    structured = result.structured_content
    if structured is not None and not any(_repeats(part, structured) for part in parts):
        parts.append(json.dumps(structured, ensure_ascii=False, separators=(",", ":")))
    text = "\n".join(parts)
    if result.is_error:
        raise ModelFaultError(text or "the tool failed and does not say why")
    return text


def _repeats(part: str, structured: Any) -> bool:
    """Say whether a text is the structured content, or the one value that it wraps."""
    values = [structured]
    if isinstance(structured, dict) and structured.keys() == {"result"}:
        values.append(structured["result"])
    if part in values:
        return True
    try:
        told = json.loads(part)
        return any(_canonical(told) == _canonical(each) for each in values)
    except (ValueError, RecursionError):
        return False


def _canonical(value: Any) -> str:
    """Return JSON that is the same for the same value; unlike `==` it tells 1 from true."""
    return json.dumps(value, sort_keys=True)


def _text(block: ContentBlock) -> str:
    match block:
        case TextContent():
            return block.text
        case ImageContent() | AudioContent():
            return f"[{block.type}, {block.mime_type}, {_bytes(block.data)}]"
        case ResourceLink():
            size = f", {block.size:,} bytes" if block.size is not None else ""
            return f"[resource {block.uri}, {block.mime_type or 'unknown type'}{size}]"
        case EmbeddedResource():
            held = block.resource
            kind = held.mime_type or "unknown type"
            if isinstance(held, BlobResourceContents):
                return f"[resource {held.uri}, {kind}, {_bytes(held.blob)}]"
            return f"[resource {held.uri}, {kind}, {len(held.text.encode()):,} bytes]"


def _bytes(base64: str) -> str:
    return f"{len(base64.rstrip('=')) * 3 // 4:,} bytes"
