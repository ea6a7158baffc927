"""A server that people already run: `vllm serve`, or any OpenAI-compatible one, over HTTP.

Theory of operation. Prompts go to `/v1/completions` as token ids, with the served model's tokenizer
loaded here, so that sessions stay token-exact. What a server understands beyond the plain API is
found out at `start` by asking it: `DIALECTS` from the most exact to the least. A request is aborted
by closing its connection. What such a server does not tell (KV events, its queue's share of the
time) is missing from `capabilities`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx

from contracts.error import BadInputError, UnavailableError
from contracts.llm_step import FinishReason
from inference_service.engine.openai_wire import (
    ASK_S,
    CONNECT_S,
    DIALECTS,
    Delta,
    OpenAIConfig,
    cache_from_metrics,
    completion_body,
    connect,
    deltas,
    list_models,
    load_from_metrics,
    refusal,
    unreachable,
)
from inference_service.engine.protocol import (
    WARM_UP_SCHEMA,
    Capability,
    EngineCapacity,
    EngineDeadError,
    EngineOutput,
    EngineRequest,
    EngineRequestError,
    EngineStats,
    EngineStepStats,
    EngineTiming,
    answer_room,
    ignore_step,
)
from inference_service.engine.tokenizer import TransformersTokenizer

log = logging.getLogger(__name__)

HEALTH_S = 1.5
"""A server that is busy may answer late: that it took the connection is enough."""

DEFAULT_BLOCK_SIZE = 16
"""vLLM's on GPUs, assumed where a server does not tell its own."""

PATIENT = httpx.Timeout(CONNECT_S, read=None)
"""For generations: whoever consumes them bounds the gaps between pieces."""

MAX_NUM_BATCHED_TOKENS = 2_048
"""What a server is taken to compute in one engine step; none tells."""

PROBE = "Tokens? 12345 Ünïcödé 漢字\n\tif a != b: return {'x': [1.5e-3]}  # ok"
"""Text that two tokenizers hardly cut alike unless they are the same."""


class OpenAIEngine:
    """A server behind the `Engine` protocol."""

    cache = None
    """KV events do not come over HTTP."""

    def __init__(self, config: OpenAIConfig) -> None:
        self.config = config
        self.capabilities: frozenset[Capability] = frozenset()
        self.on_step: Callable[[EngineStepStats], object] = ignore_step
        self._client: httpx.AsyncClient | None = None
        self._tokenizer: TransformersTokenizer | None = None
        self._capacity: EngineCapacity | None = None
        self._dialect = DIALECTS[0]
        self._model = config.model
        self._in_flight = 0

    @property
    def tokenizer(self) -> TransformersTokenizer:
        """The served model's tokenizer; valid after `start`."""
        assert self._tokenizer is not None, "the engine is not started"
        return self._tokenizer

    async def start(self) -> EngineCapacity:
        """Find out what the server serves and understands; returns the capacity.

        Raises EngineDeadError if it does not answer, BadInputError for a server that cannot be
        used: the wrong tokenizer, no such model, sizes that nobody tells.
        """
        await self.close()
        config = self.config
        self._client = connect(config.url, config.api_key)
        try:
            card = await self._find_model()
            self._tokenizer = await asyncio.to_thread(TransformersTokenizer, config.tokenizer)
            metrics = await self._metrics()
            self._capacity = self._find_capacity(card, metrics)
            await self._find_capabilities(metrics)
            await self._check_tokenizer()
            await self._check_schema()
        except BaseException:
            await self.close()
            raise
        return self._capacity

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Generate on the server; the last piece tells the cached tokens, if the server does."""
        async with aclosing(self._generate(request)) as outputs:
            async for output, _ in outputs:
                yield output

    def blocks(self, num_tokens: int) -> int:
        """Return the KV blocks of a sequence of that many tokens."""
        assert self._capacity is not None, "the engine is not started"
        return -(-num_tokens // self._capacity.block_size)

    async def stats(self) -> EngineStats:
        """Return the load by the server's metrics; without them, that of our own requests."""
        self._running()
        load = load_from_metrics(await self._metrics())
        if load is None:
            return EngineStats(num_running=self._in_flight, num_waiting=0, kv_cache_usage=0.0)
        waiting = max(load.num_waiting, self._in_flight - load.num_running)
        return EngineStats(load.num_running, waiting, load.kv_cache_usage, load.num_preemptions)

    async def check_health(self) -> None:
        """Raise EngineDeadError if the server does not answer, or says that it is not well."""
        try:
            response = await self._running().get("/health", timeout=HEALTH_S)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise unreachable(error, self.config.url) from error
        except httpx.TransportError:
            return
        if response.status_code >= 500:
            raise EngineDeadError(
                f"the server at {self.config.url!r} is not well ({response.status_code})",
                hint="its log says why",
            )

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; vLLM allows it in its development mode only."""
        async with self._translated():
            response = await self._running().post("/reset_prefix_cache", timeout=ASK_S)
        if response.status_code != 200:
            return False
        return bool(response.json().get("success")) if response.content else True

    async def close(self) -> None:
        """Close all connections, which aborts what is generated; the server stays."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _generate(
        self, request: EngineRequest
    ) -> AsyncGenerator[tuple[EngineOutput, Delta], None]:
        """Yield pieces, each with the message it came from."""
        client, config = self._running(), self.config
        assert self._capacity is not None
        body = completion_body(
            request,
            model=self._model,
            max_tokens=answer_room(request, self._capacity.max_model_len),
            dialect=self._dialect,
            tokenizer=self.tokenizer,
        )
        start_s = first_s = time.monotonic()
        last: Delta | None = None
        usage = Delta()
        self._in_flight += 1
        try:
            async with (
                self._translated(),
                client.stream("POST", "/v1/completions", json=body, timeout=PATIENT) as response,
            ):
                if response.status_code != 200:
                    await response.aread()
                    raise refusal(response.status_code, response.text, config.url)
                async for delta in deltas(response, config.url):
                    if delta.prompt_tokens is not None:
                        usage = delta
                    ids = self._token_ids(delta)
                    if first_s == start_s and ids:
                        first_s = time.monotonic()
                    if delta.finish_reason is not None:
                        last = delta
                    elif ids:
                        yield EngineOutput(ids), delta
        finally:
            self._in_flight -= 1
        if last is None:
            raise UnavailableError(
                f"the server at {config.url!r} ended its answer early", hint="its log says why"
            )
        timing = EngineTiming(0.0, first_s - start_s, time.monotonic() - first_s)
        ids, cached = self._token_ids(last), usage.cached_tokens
        output = EngineOutput(ids, cached or 0, last.finish_reason, timing)
        yield output, replace(last, cached_tokens=cached)

    def _token_ids(self, delta: Delta) -> list[int]:
        """Return the ids sampled; where only text is told, ids of that text."""
        if delta.token_ids is not None:
            return delta.token_ids
        ids = self.tokenizer.encode(delta.text, split_special=True)
        if delta.finish_reason is FinishReason.STOP:
            ids.append(self.tokenizer.eos_token_id)
        return ids

    async def _find_model(self) -> dict[str, Any]:
        """Return what the server tells of the model to use, whose name becomes ours."""
        async with self._translated():
            cards = await list_models(self._running(), self.config.url)
        names = [str(card.get("id")) for card in cards]
        wanted = self.config.model
        if not wanted and len(names) == 1:
            wanted = names[0]
        if wanted not in names:
            raise BadInputError(
                f"the server at {self.config.url!r} serves {', '.join(map(repr, names)) or 'none'}"
                + (f", not {wanted!r}" if wanted else ""),
                hint="set MUSTER_OPENAI_MODEL to one of them",
            )
        self._model = wanted
        return cards[names.index(wanted)]

    def _find_capacity(self, card: dict[str, Any], metrics: str) -> EngineCapacity:
        config, told = self.config, card.get("max_model_len")
        lengths = [n for n in (config.max_model_len, told) if isinstance(n, int)]
        if not lengths:
            raise BadInputError(
                f"the server at {config.url!r} does not tell its context window",
                hint="set MUSTER_MAX_MODEL_LEN to it, in tokens",
            )
        kv_tokens, block_size = cache_from_metrics(metrics) or (None, DEFAULT_BLOCK_SIZE)
        kv_tokens = config.kv_tokens or kv_tokens
        if kv_tokens is None:
            raise BadInputError(
                f"the server at {config.url!r} does not tell the size of its KV cache",
                hint="set MUSTER_OPENAI_KV_TOKENS to it, in tokens; vLLM's log says it",
            )
        return EngineCapacity(
            max_num_seqs=config.max_num_seqs,
            kv_tokens=kv_tokens,
            block_size=block_size,
            max_model_len=min(lengths),
            max_num_batched_tokens=max(MAX_NUM_BATCHED_TOKENS, config.max_num_seqs),
        )

    async def _find_capabilities(self, metrics: str) -> None:
        """Speak the first dialect that the server takes, and note what it can do."""
        ids = self.tokenizer.encode(PROBE, split_special=True)
        request = EngineRequest("probe", ids, max_tokens=1, priority=1)
        refused: EngineRequestError | None = None
        for self._dialect in DIALECTS:
            try:
                seen = [delta async for _, delta in self._generate(request)]
                break
            except EngineRequestError as error:
                refused = error
        else:
            assert refused is not None
            raise BadInputError(
                f"the server at {self.config.url!r} takes no completions: {refused.message}",
                hint="it must serve /v1/completions, streamed",
            )
        found = {
            Capability.PRIORITY: self._dialect.priority,
            Capability.CACHED_TOKENS: seen[-1].cached_tokens is not None,
            Capability.EXACT_TOKEN_IDS: any(delta.token_ids is not None for delta in seen),
            Capability.LOAD: load_from_metrics(metrics) is not None,
            Capability.CACHE_RESET: await self._can_reset(),
        }
        self.capabilities = frozenset(name for name, has in found.items() if has)
        log.info("server found", extra={"model": self._model, "dialect": str(self._dialect)})

    async def _can_reset(self) -> bool:
        """Whether there is an endpoint: a request that it must refuse resets nothing."""
        async with self._translated():
            response = await self._running().post("/reset_prefix_cache?reset_external=maybe")
        return response.status_code == 422

    async def _check_tokenizer(self) -> None:
        """Raise BadInputError unless the server cuts a text as our tokenizer does."""
        turns = [{"role": "user", "content": PROBE}]
        text = self.tokenizer.render(turns, add_generation_prompt=True)
        ours = self.tokenizer.encode(text, split_special=False)
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        async with self._translated():
            response = await self._running().post("/tokenize", json=body, timeout=ASK_S)
            if response.status_code == 200 and "tokens" in response.json():
                theirs = response.json()["tokens"]
                differs = theirs != ours
            else:
                plain = {"model": self._model, "prompt": text, "max_tokens": 1}
                response = await self._running().post("/v1/completions", json=plain, timeout=ASK_S)
                count = (response.json().get("usage") or {}).get("prompt_tokens")
                theirs = [0] * (count or 0)
                differs = count is not None and count - len(ours) not in (0, 1)  # 1: a BOS
        if differs:
            raise BadInputError(
                f"the tokenizer at {str(self.config.tokenizer)!r} is not that of the model "
                f"{self._model!r} at {self.config.url!r}: it cuts a text into {len(ours)} tokens, "
                f"the server into {len(theirs)}, or others",
                hint="set MUSTER_MODEL to the model that the server serves",
            )

    async def _check_schema(self) -> None:
        """Raise BadInputError unless the server holds its answers to a JSON schema."""
        words = self.tokenizer.encode("ready? " * 8, split_special=True)
        request = EngineRequest("warm-up", words, 24, json_schema=WARM_UP_SCHEMA)
        text = ""
        try:
            ids = [i async for output in self.generate(request) for i in output.token_ids]
            text = self.tokenizer.decode(ids)
            is_held = json.loads(text).keys() == {"ready"}
        except EngineRequestError as error:
            text, is_held = error.message, False
        except (ValueError, AttributeError):
            is_held = False
        if not is_held:
            raise BadInputError(
                f"the server at {self.config.url!r} does not hold answers to a JSON schema: asked "
                f"for an object with `ready`, it answered {text!r}",
                hint="tool calls need response_format with json_schema on /v1/completions",
            )

    async def _metrics(self) -> str:
        """Return vLLM's metrics, or nothing where a server has none."""
        async with self._translated():
            response = await self._running().get("/metrics", timeout=ASK_S)
        return response.text if response.status_code == 200 else ""

    def _running(self) -> httpx.AsyncClient:
        if self._client is None:
            raise EngineDeadError("the engine is not started, or closed")
        return self._client

    @asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        """Translate what goes wrong with a connection."""
        try:
            yield
        except (httpx.TransportError, httpx.InvalidURL) as error:
            self._running()
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.InvalidURL):
                raise unreachable(error, self.config.url) from error
            await self.check_health()
            raise UnavailableError(
                f"the server at {self.config.url!r} broke off: {error!r}", hint="its log says why"
            ) from error
