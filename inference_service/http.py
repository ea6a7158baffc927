"""The service's HTTP surface: is it alive, and what is it doing."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from inference_service.engine.protocol import EngineCapacity, EngineDeadError
from inference_service.service import InferenceService


def http_app(service: InferenceService, *, model: str, capacity: EngineCapacity) -> Starlette:
    """Return the ASGI application.

    `GET /health`: 200 `{"status": "ok"}`, or 503 with the reason. `GET /stats`: the model, the
    replica, its capacity (requests and tokens), steps ready and in the engine, the share of KV
    blocks in use (0 to 1), and counts of cohorts and of the steps in them since the start.
    """

    async def health(_: Request) -> JSONResponse:
        try:
            await service.engine.check_health()
        except EngineDeadError as error:
            return JSONResponse({"status": "dead", "reason": str(error)}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def stats(_: Request) -> JSONResponse:
        ready, in_engine = service.dispatcher.counts()
        engine = await service.engine.stats()
        return JSONResponse(
            {
                "model": model,
                "replica": service.replica,
                "max_num_seqs": capacity.max_num_seqs,
                "kv_tokens": capacity.kv_tokens,
                "max_model_len": capacity.max_model_len,
                "ready": ready,
                "in_engine": in_engine,
                "engine_running": engine.num_running,
                "engine_waiting": engine.num_waiting,
                "kv_cache_usage": engine.kv_cache_usage,
                "cohorts": service.dispatcher.tally.cohorts,
                "steps": service.dispatcher.tally.steps,
            }
        )

    return Starlette(routes=[Route("/health", health), Route("/stats", stats)])
