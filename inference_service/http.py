"""The service's HTTP surface: is it alive, and what is it doing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from inference_service.engine.protocol import EngineCapacity, EngineDeadError
from inference_service.service import InferenceService
from inference_service.stream import JobStream

MAX_STREAMS = 64
"""Readers who follow jobs at once: each looks at the service ten times a second."""

PING_S = 15
"""A silent stream shows this often that it is alive."""


def http_app(
    service: InferenceService, *, model: str, capacity: EngineCapacity, metrics: CollectorRegistry
) -> Starlette:
    """Return the ASGI application.

    `GET /health`: 200 `{"status": "ok"}`, or 503 with the reason.

    `GET /stats`: the model, the replica, its capacity (requests and tokens), steps ready and in the
    engine, the share of KV blocks in use (0 to 1), and counts since the start: cohorts and the
    steps in them, steps shed, events that the scheduler refused (a bug), prompt tokens and those
    that were cached, preemptions, tokens computed for refreshes and prewarms (`overhead_tokens`),
    and where the scheduler's model of the cache and the engine disagreed, and prompts that differed
    from their session; `template_defect` says why, where the chat template is not append-only.

    `GET /cohorts`: the scheduler's view (`SchedulerView`), the last cohorts (newest last), what the
    engine tells of its prefix cache, the account that refreshes and prewarms go to (`overhead`; its
    `computed_tokens` are the `overhead_tokens` of `/stats`), and where the engine's wall time went
    (`gpu`: a `GPUAccount`, in seconds, and its `opportunity`).

    `GET /jobs/JOB/stream`: server-sent events of what the job's running steps write, for as long as
    the reader stays: `begun`, `written` and `ended` (`stream.py`), each with its fields as JSON. At
    most MAX_STREAMS at once: more get 503.

    `GET /metrics`: what `metrics` holds, in Prometheus' text format.
    """

    async def health(_: Request) -> JSONResponse:
        if service.trouble:
            return JSONResponse({"status": "dead", "reason": service.trouble}, status_code=503)
        try:
            await service.engine.check_health()
        except EngineDeadError as error:
            return JSONResponse({"status": "dead", "reason": str(error)}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def stats(_: Request) -> JSONResponse:
        head = {
            "model": model,
            "replica": service.replica,
            "max_num_seqs": capacity.max_num_seqs,
            "kv_tokens": capacity.kv_tokens,
            "max_model_len": capacity.max_model_len,
        }
        return JSONResponse(head | await _stats(service))

    async def cohorts(_: Request) -> JSONResponse:
        return JSONResponse(_cohorts(service))

    async def stream(request: Request) -> Response:
        if len(service.on_end) >= MAX_STREAMS:
            reason = f"{MAX_STREAMS} streams are open, the limit"
            return JSONResponse({"status": "busy", "reason": reason}, status_code=503)
        followed = JobStream(service, request.path_params["job_id"])
        return EventSourceResponse(_server_events(followed), ping=PING_S)

    async def collect(_: Request) -> Response:
        # Off the event loop: collecting looks at the service from outside.
        text = await asyncio.to_thread(generate_latest, metrics)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/stats", stats),
            Route("/cohorts", cohorts),
            Route("/metrics", collect),
            Route("/jobs/{job_id}/stream", stream),
        ]
    )


async def _server_events(stream: JobStream) -> AsyncIterator[ServerSentEvent]:
    try:
        async with aclosing(stream.events()) as events:
            async for event in events:
                yield ServerSentEvent(json.dumps(asdict(event)), event=type(event).__name__.lower())
    finally:
        stream.close()


async def _stats(service: InferenceService) -> dict[str, Any]:
    dispatcher = service.dispatcher
    ready, in_engine = dispatcher.counts()
    engine = await service.engine.stats()
    tally, overhead, view = dispatcher.tally, dispatcher.touches.overhead, dispatcher.view()
    return {
        "ready": ready,
        "in_engine": in_engine,
        "engine_running": engine.num_running,
        "engine_waiting": engine.num_waiting,
        "kv_cache_usage": engine.kv_cache_usage,
        "cohorts": tally.cohorts,
        "steps": tally.steps,
        "shed": tally.shed,
        "refused_events": tally.refused_events,
        "prompt_tokens": tally.prompt_tokens,
        "cached_tokens": tally.cached_tokens,
        "preemptions": engine.num_preemptions,
        "overhead_tokens": overhead.computed_tokens,
        "disagreements": view.disagreements,
        "disagreement_tokens": view.disagreement_tokens,
        "divergences": service.sessions.divergences,
        "template_defect": service.sessions.template_defect,
    }


def _cohorts(service: InferenceService) -> dict[str, Any]:
    dispatcher, cache = service.dispatcher, service.engine.cache
    now = dispatcher.now()
    overhead, gpu = dispatcher.touches.overhead, dispatcher.gpu.account(now)
    return {
        "scheduler": asdict(dispatcher.view()),
        "last_cohorts": [
            {"age_s": now - cohort.dispatched_s, "steps": cohort.step_ids}
            for cohort in dispatcher.last_cohorts
        ],
        "cache": None
        if cache is None
        else {"block_size": cache.block_size, "is_degraded": cache.is_degraded},
        "sessions": dispatcher.num_sessions,
        "overhead": asdict(overhead) | {"computed_tokens": overhead.computed_tokens},
        "gpu": asdict(gpu) | {"opportunity": gpu.opportunity},
        "tokens": {
            "prompt": dispatcher.tally.prompt_tokens,
            "cached": dispatcher.tally.cached_tokens,
        },
    }
