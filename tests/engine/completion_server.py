"""A small server with `/v1/completions`, as strict, as poor or as broken as a test wants it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Generator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from inference_service.engine.tokenizer import TransformersTokenizer
from muster.stack.port import free_port

MODEL = {"id": "small", "object": "model", "max_model_len": 512}
PLAIN = {
    *("model", "prompt", "max_tokens", "temperature", "top_p", "seed", "stream", "stream_options"),
    "response_format",
}
EXTENSIONS = {"return_token_ids", "stop_token_ids"}


@dataclass
class CompletionServer:
    """Answers everything with `answer`, one piece for each word, or fails as `failure` says.

    `known` are the parameters that it takes; others it refuses, as it does prompts of ids unless
    `takes_ids`. `failure`: a status, or `early`, `told`, `garbage`, `silent`.
    """

    tokenizer: TransformersTokenizer
    models: list[dict[str, Any]] = field(default_factory=lambda: [dict(MODEL)])
    metrics: str = ""
    known: set[str] = field(default_factory=lambda: set(PLAIN))
    takes_ids: bool = True
    api_key: str = ""
    answer: str = "hello over there"
    schema_answer: str = '{"ready":true}'
    failure: int | str = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """Serve until the end of the context; yields the URL."""
        port = free_port()
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/completions", self._completions, methods=["POST"]),
            *([Route("/metrics", self._metrics)] if self.metrics else []),
        ]
        config = uvicorn.Config(Starlette(routes=routes), port=port, log_config=None)
        config.timeout_graceful_shutdown = 1
        server = _Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.should_exit = True
            await serving

    async def _models(self, request: Request) -> Response:
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return JSONResponse({"error": {"message": "who are you?"}}, 401)
        return JSONResponse({"object": "list", "data": self.models})

    async def _metrics(self, _request: Request) -> Response:
        return PlainTextResponse(self.metrics)

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        unknown = body.keys() - self.known
        if unknown or (isinstance(body["prompt"], list) and not self.takes_ids):
            said = f"unknown: {sorted(unknown)}" if unknown else "prompt: string expected"
            return JSONResponse({"error": {"message": said, "code": 400}}, 400)
        if isinstance(self.failure, int) and self.failure:
            return JSONResponse({"error": {"message": "no luck"}}, self.failure)
        text = self.schema_answer if "response_format" in body else self.answer
        if not body.get("stream"):
            return JSONResponse({"choices": [{"text": text}], "usage": self._usage(body)})
        return StreamingResponse(self._stream(body, text), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any], text: str) -> AsyncIterator[str]:
        try:
            for word in text.replace(" ", " \0").split("\0"):
                yield self._event({"choices": [self._choice(body, word)]})
            match self.failure:
                case "silent":
                    await asyncio.Event().wait()
                case "told":
                    yield self._event({"error": {"message": "out of memory", "code": 500}})
                case "garbage":
                    yield "data: <html>\n\n"
            if not self.failure:
                yield ": still here\n\n"
                yield self._event({"choices": [{"text": "", "finish_reason": "stop"}]})
                yield self._event({"choices": [], "usage": self._usage(body)})
                yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.aborted.set()
            raise

    def _choice(self, body: dict[str, Any], word: str) -> dict[str, Any]:
        choice: dict[str, Any] = {"text": word, "finish_reason": None}
        if body.get("return_token_ids"):
            choice["token_ids"] = self.tokenizer.encode(word, split_special=True)
        return choice

    def _usage(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["prompt"]
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt, split_special=False)
        return {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": 7}}

    @staticmethod
    def _event(value: dict[str, Any]) -> str:
        return f"data: {json.dumps(value)}\n\n"


class _Server(uvicorn.Server):
    """Uvicorn that leaves signals to the test run."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture none."""
        yield
