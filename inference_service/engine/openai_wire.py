"""What OpenAI-compatible servers take and say, in the words of the engine protocol."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from contracts.error import BadInputError, MusterError, UnavailableError
from contracts.llm_step import FinishReason
from inference_service.engine.protocol import (
    ChatTokenizer,
    EngineDeadError,
    EngineRequest,
    EngineRequestError,
    EngineStats,
)

FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}

CONNECT_S = 10.0
ASK_S = 30.0
"""How long a server may take for what is no generation."""

MAX_QUOTED = 500
"""Characters of a server's own words that an error repeats."""

METRIC = re.compile(r"^(vllm:\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class OpenAIConfig:
    """Which server, and what it does not tell itself.

    `url` with or without `/v1`. `tokenizer` is the directory of the served model's tokenizer.
    `model` is the server's name for it; empty takes the only one it serves. `kv_tokens` and
    `max_model_len` None mean what the server tells.
    """

    url: str
    tokenizer: Path
    api_key: str = field(default="", repr=False)
    model: str = ""
    max_num_seqs: int = 32
    kv_tokens: int | None = None
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a server understands beyond the plain completions API.

    `token_ids`: a prompt may be ids. `extensions`: vLLM's stop ids and returned ids. `priority`:
    requests have one.
    """

    token_ids: bool
    extensions: bool
    priority: bool


DIALECTS = (
    Dialect(token_ids=True, extensions=True, priority=True),
    Dialect(token_ids=True, extensions=True, priority=False),
    Dialect(token_ids=True, extensions=False, priority=False),
    Dialect(token_ids=False, extensions=False, priority=False),
)
"""From the most exact to the least: the first that a server takes is spoken."""


@dataclass(frozen=True, slots=True)
class Delta:
    """One message of a stream: what was sampled, or how it ended, or what it used."""

    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: FinishReason | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


def completion_body(
    request: EngineRequest,
    *,
    model: str,
    max_tokens: int,
    dialect: Dialect,
    tokenizer: ChatTokenizer,
) -> dict[str, Any]:
    """Return the JSON of `POST /v1/completions`, streamed."""
    ids = list(request.prompt_token_ids)
    body: dict[str, Any] = {
        "model": model,
        "prompt": ids if dialect.token_ids else prompt_text(ids, tokenizer),
        "max_tokens": max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.temperature > 0 and request.seed is not None:
        body["seed"] = request.seed
    if dialect.extensions:
        body["return_token_ids"] = True
        body["stop_token_ids"] = [tokenizer.eos_token_id]
    if dialect.priority:
        body["priority"] = request.priority
    if request.json_schema is not None:
        named = {"name": "answer", "schema": request.json_schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    return body


def prompt_text(ids: list[int], tokenizer: ChatTokenizer) -> str:
    """Return a prompt as text for a server that takes no ids.

    Raises EngineRequestError if text in it would become a control token on the way.
    """
    text = tokenizer.to_text(ids)
    control = {tokenizer.encode(t, split_special=False)[0] for t in tokenizer.special_tokens}
    sent = tokenizer.encode(text, split_special=False)
    if sum(i in control for i in sent) != sum(i in control for i in ids):
        raise EngineRequestError(
            "the prompt holds text that looks like a control token, and this server takes prompts "
            "only as text, where the two are the same",
            hint="use a server that takes token ids, as vLLM does",
        )
    return text


async def deltas(response: httpx.Response, url: str) -> AsyncIterator[Delta]:
    """Yield the messages of a stream of completions; raises for an error that it tells."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue  # comments that keep the connection alive, and blank lines
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            message = json.loads(data)
        except ValueError as error:
            raise UnavailableError(
                f"the server at {url!r} sent what is no JSON: {data[:MAX_QUOTED]!r}",
                hint="is this an OpenAI-compatible server?",
            ) from error
        if "error" in message:
            told = message["error"]
            status = told.get("code") if isinstance(told, dict) else None
            raise refusal(status if isinstance(status, int) else 500, data, url)
        yield _delta(message, url)


def _delta(message: dict[str, Any], url: str) -> Delta:
    usage = message.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    choices = message.get("choices") or [{}]
    reason = choices[0].get("finish_reason")
    if reason is not None and reason not in FINISH_REASONS:
        raise UnavailableError(
            f"the server at {url!r} failed the request (finish reason {reason!r})",
            hint="its log says why",
        )
    return Delta(
        text=choices[0].get("text") or "",
        token_ids=choices[0].get("token_ids"),
        finish_reason=FINISH_REASONS.get(reason),
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=details.get("cached_tokens"),
    )


def refusal(status: int, body: str, url: str) -> MusterError:
    """Return the protocol's error for an HTTP status and what the server said with it."""
    said = _message(body)[:MAX_QUOTED]
    if status in (401, 403):
        return BadInputError(
            f"the server at {url!r} refuses the API key ({status}): {said}",
            hint="set MUSTER_OPENAI_API_KEY",
        )
    if status == 404:
        return BadInputError(
            f"the server at {url!r} knows nothing of that ({status}): {said}",
            hint="check MUSTER_OPENAI_URL and MUSTER_OPENAI_MODEL",
        )
    if status == 429:
        return UnavailableError(
            f"the server at {url!r} takes no more requests ({status}): {said}",
            hint="lower MUSTER_MAX_NUM_SEQS, or let nobody else use the server",
        )
    if 400 <= status < 500:
        return EngineRequestError(
            f"the server refuses the request ({status}): {said}",
            hint="change the prompt, sampling or schema",
        )
    return UnavailableError(
        f"the server at {url!r} failed the request ({status}): {said}", hint="its log says why"
    )


def unreachable(error: Exception, url: str) -> EngineDeadError:
    """Return the error for a server that does not answer at all."""
    return EngineDeadError(
        f"no server answers at {url!r}: {str(error) or type(error).__name__}",
        hint="start it, or check MUSTER_OPENAI_URL",
    )


def _message(body: str) -> str:
    """Return the words in an error's body: OpenAI's form, vLLM's older form, or all of it."""
    try:
        value = json.loads(body)
    except ValueError:
        return body
    if isinstance(value, dict):
        value = value.get("error", value)
    if isinstance(value, dict):
        value = value.get("message", value)
    return value if isinstance(value, str) else json.dumps(value)


def load_from_metrics(text: str) -> EngineStats | None:
    """Return the load that vLLM's `/metrics` tells, over all its engines; None if it tells none."""
    found: dict[str, list[float]] = {}
    for name, _, value in METRIC.findall(text):
        found.setdefault(name, []).append(float(value))
    if "vllm:num_requests_running" not in found:
        return None
    usage = found.get("vllm:kv_cache_usage_perc", [0.0])
    return EngineStats(
        num_running=int(sum(found["vllm:num_requests_running"])),
        num_waiting=int(sum(found.get("vllm:num_requests_waiting", []))),
        kv_cache_usage=sum(usage) / len(usage),
        num_preemptions=int(sum(found.get("vllm:num_preemptions_total", []))),
    )


def cache_from_metrics(text: str) -> tuple[int, int] | None:
    """Return the KV cache that vLLM's `/metrics` tells: (tokens, block size), or None."""
    sizes = list(_cache_sizes(text))
    return (sum(tokens for tokens, _ in sizes), sizes[0][1]) if sizes else None


def _cache_sizes(text: str) -> Iterator[tuple[int, int]]:
    for name, labels, _ in METRIC.findall(text):
        if name == "vllm:cache_config_info":
            told = {key: int(value) for key, value in LABEL.findall(labels) if value.isdecimal()}
            size, blocks = told.get("block_size", 0), told.get("num_gpu_blocks", 0)
            if size and blocks:
                # one block is vLLM's placeholder; blocks x size is wrong for hybrid models
                yield told.get("kv_cache_size_tokens", blocks * size) - size, size


def connect(url: str, api_key: str, timeout_s: float = ASK_S) -> httpx.AsyncClient:
    """Return a client for the server; nothing is asked yet."""
    return httpx.AsyncClient(
        base_url=url.rstrip("/").removesuffix("/v1").rstrip("/"),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S)),
        limits=httpx.Limits(max_connections=None),
    )


async def served_models(url: str, api_key: str, timeout_s: float) -> list[str]:
    """Return the names of what a server serves.

    Raises EngineDeadError if it does not answer, BadInputError if it refuses or is no such server.
    """
    async with connect(url, api_key, timeout_s) as client:
        try:
            return [str(card.get("id")) for card in await list_models(client, url)]
        except httpx.TransportError as error:
            raise unreachable(error, url) from error


async def list_models(client: httpx.AsyncClient, url: str) -> list[dict[str, Any]]:
    """Return what `/v1/models` tells; raises BadInputError if that is no list of models."""
    response = await client.get("/v1/models")
    if response.status_code != 200:
        raise refusal(response.status_code, response.text, url)
    try:
        cards: list[dict[str, Any]] = response.json()["data"]
    except (ValueError, KeyError, TypeError) as error:
        raise BadInputError(
            f"what answers at {url!r} is no OpenAI-compatible server",
            hint="check MUSTER_OPENAI_URL",
        ) from error
    return cards
