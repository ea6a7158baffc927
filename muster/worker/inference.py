"""The inference service's process: one engine, its scheduler, its Temporal workers, its HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from contracts.error import UnavailableError
from inference_service.engine.openai import OpenAIEngine
from inference_service.engine.openai_wire import OpenAIConfig
from inference_service.engine.protocol import Engine, EngineCapacity
from inference_service.engine.simulated import SimulatedConfig, SimulatedEngine
from inference_service.http import http_app
from inference_service.metric import ServiceMetrics
from inference_service.scheduler.event import CapacityChanged
from inference_service.scheduler.ready_cohort import ReadyCohort
from inference_service.scheduler.setting import SchedulerSettings
from inference_service.service import InferenceService
from inference_service.worker import WorkerSettings, fail_orphans, serve
from muster import telemetry
from muster.connection import connect, identity
from muster.database_url import database_url
from muster.settings import Settings
from muster.stack.namespace import check_namespace
from muster.stack.port import bound_socket
from muster.worker.lifecycle import stop_event
from store.context import ContextStore
from store.database import Database
from store.step_ledger import StepLedger

log = logging.getLogger(__name__)


async def main(settings: Settings) -> None:
    """Serve until SIGTERM. Raises UnavailableError when the engine dies: start it anew."""
    stop = stop_event()
    with bound_socket(
        settings.inference_host, settings.inference_port, "MUSTER_INFERENCE_PORT"
    ) as http:
        await _serve(settings, stop, http)


async def _serve(settings: Settings, stop: asyncio.Event, http: socket.socket) -> None:
    client = await connect(settings, role="inference")
    await check_namespace(client)
    database = Database(database_url(settings), pool_size=settings.database_pool_size)
    engine = await _engine(settings)
    try:
        await database.check()
        ledger = StepLedger(database)
        orphans = await fail_orphans(client, ledger, settings.replica)
        log.info("orphaned attempts failed", extra={"orphans": orphans})
        capacity = await engine.start()
        log.info("engine up", extra={"capacity": str(capacity)})
        service = InferenceService(
            engine=engine,
            scheduler=ReadyCohort(_capacity_event(capacity), _scheduler_settings(settings)),
            ledger=ledger,
            contexts=ContextStore(database),
            replica=settings.replica,
        )
        metrics = CollectorRegistry()
        meter = telemetry.meter("inference", metrics)
        ServiceMetrics(meter, service, model=settings.served_model)
        app = http_app(service, model=settings.served_model, capacity=capacity, metrics=metrics)
        async with _http(app, http):
            await serve(
                client,
                service,
                model=settings.served_model,
                stop=stop,
                settings=_worker_settings(settings),
                identity=identity("inference"),
            )
        if service.engine_died.is_set():
            raise UnavailableError(service.trouble, hint="its last words stand above")
    finally:
        await engine.close()
        await database.close()


async def _engine(settings: Settings) -> Engine:
    if settings.engine == "simulated":
        return SimulatedEngine(_simulated_config(settings))
    # Imported here so that a simulated service needs neither vLLM nor torch.
    from inference_service.model import prepare_model

    is_served = settings.engine == "openai"
    model = await asyncio.to_thread(
        prepare_model, settings.model, settings.data_dir, log.info, with_weights=not is_served
    )
    if is_served:
        return OpenAIEngine(openai_config(settings, model.path))
    from inference_service.engine.vllm import VLLMConfig, VLLMEngine

    return VLLMEngine(
        VLLMConfig(
            model=model.path,
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len or None,
            kv_cache_bytes=settings.kv_cache_bytes or None,
        )
    )


def _simulated_config(settings: Settings) -> SimulatedConfig:
    """Return the default size, grown so that the cache holds two of the longest contexts."""
    usual = SimulatedConfig()
    longest = settings.max_model_len or usual.max_model_len
    return SimulatedConfig(
        max_num_seqs=settings.max_num_seqs,
        num_blocks=max(usual.num_blocks, -(-2 * longest // usual.block_size)),
        max_model_len=longest,
        time_scale=settings.simulated_time_scale,
    )


def openai_config(settings: Settings, tokenizer: Path) -> OpenAIConfig:
    """Return which server to use, with the tokenizer in that directory."""
    return OpenAIConfig(
        url=settings.openai_url,
        tokenizer=tokenizer,
        api_key=settings.openai_api_key.get_secret_value(),
        model=settings.openai_model,
        max_num_seqs=settings.max_num_seqs,
        kv_tokens=settings.openai_kv_tokens or None,
        max_model_len=settings.max_model_len or None,
    )


def _scheduler_settings(settings: Settings) -> SchedulerSettings:
    return SchedulerSettings(
        max_overtaken_s=settings.max_overtaken.total_seconds(),
        tenant_weights=settings.tenant_weights,
    )


def _capacity_event(capacity: EngineCapacity) -> CapacityChanged:
    return CapacityChanged(
        max_num_seqs=capacity.max_num_seqs,
        num_blocks=capacity.kv_tokens // capacity.block_size,
        block_size=capacity.block_size,
        max_model_len=capacity.max_model_len,
        prefill_tokens=2 * capacity.max_num_batched_tokens,
    )


def _worker_settings(settings: Settings) -> WorkerSettings:
    """Ask for cancellations by heartbeat unless the server is ours, which pushes them."""
    is_external = bool(settings.temporal_address)
    return WorkerSettings(
        cancel_heartbeat=timedelta(seconds=1) if is_external else None,
        drain=settings.drain_timeout,
        progress=settings.progress_timeout,
    )


@contextlib.asynccontextmanager
async def _http(app: Starlette, bound: socket.socket) -> AsyncIterator[None]:
    """Serve the application on the bound socket."""
    server = _Server(uvicorn.Config(app, log_config=None))
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving


class _Server(uvicorn.Server):
    """Uvicorn that leaves signals to the process it lives in."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        """Capture none."""
        yield
