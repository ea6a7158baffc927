"""The service's metrics: what is measured, under which name, in which unit.

Numbers of the moment and counts since the start are read when somebody collects; durations of steps
are recorded as steps finish. Names under `gen_ai.` are OpenTelemetry's conventions for GenAI
servers, all others begin with `muster.`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from contracts.error import MusterError
from contracts.llm_step import LLMStepResult
from inference_service.dispatcher import Tally
from inference_service.engine.protocol import EngineStats
from inference_service.generation import Generation
from inference_service.gpu_ledger import GPUAccount
from inference_service.scheduler.view import SchedulerView
from inference_service.service import InferenceService
from inference_service.touch_request import Overhead

FRESH_S = 0.2
"""One look at the service serves all metrics of one collection."""

PATIENCE_S = 2.0
"""How long a collection waits for an event loop that is busy."""

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Bounds of the buckets of durations."""

TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
"""The same for the time of one token."""


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the service."""

    view: SchedulerView
    tally: Tally
    overhead: Overhead
    gpu: GPUAccount
    engine: EngineStats
    divergences: int


Value = float | Mapping[str, float]
"""One number, or one for each value of the metric's attribute."""


@dataclass(frozen=True, slots=True)
class Observed:
    """A metric that is read when it is collected; `attribute` tells its values apart."""

    name: str
    unit: str
    what: str
    read: Callable[[Look], Value]
    attribute: str = ""
    is_count: bool = False
    """Whether it only ever grows, from the start of the process on."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A histogram of what is recorded as steps finish."""

    name: str
    unit: str
    what: str
    bounds: tuple[float, ...]
    attribute: str = ""


def _gpu_time(look: Look) -> dict[str, float]:
    account = asdict(look.gpu)
    return {
        name.removesuffix("_s"): value
        for name, value in account.items()
        if name not in ("wall_s", "pending_s")
    }


OBSERVED = (
    Observed(
        "muster.steps", "{step}", "LLM steps in the service: in line, and in the engine",
        lambda look: {"ready": look.view.ready, "running": look.view.running}, "state",
    ),
    Observed(
        "muster.sessions", "{session}",
        "Sessions: admitted, of them with their KV kept; out for tools; without cached KV",
        lambda look: {
            "admitted": look.view.admitted, "kept": look.view.kept,
            "acting": look.view.acting, "cold": look.view.cold,
        }, "state",
    ),
    Observed(
        "muster.kv.blocks", "{block}",
        "KV cache: the working set, what it may be at most, and the whole cache",
        lambda look: {
            "working_set": look.view.working_set, "watermark": look.view.watermark,
            "cache": look.view.num_blocks,
        }, "part",
    ),
    Observed(
        "muster.kv.usage", "1", "Share of the KV blocks that running requests refer to",
        lambda look: look.engine.kv_cache_usage,
    ),
    Observed(
        "muster.engine.requests", "{request}", "Requests in the engine",
        lambda look: {"running": look.engine.num_running, "waiting": look.engine.num_waiting},
        "state",
    ),
    Observed(
        "muster.gpu.time", "s", "Wall time of the engine, by what it went to",
        _gpu_time, "use", is_count=True,
    ),
    Observed(
        "muster.cohorts", "{cohort}", "Cohorts dispatched",
        lambda look: look.tally.cohorts, is_count=True,
    ),
    Observed(
        "muster.cohort.steps", "{step}", "LLM steps dispatched in cohorts",
        lambda look: look.tally.steps, is_count=True,
    ),
    Observed(
        "muster.prompt.tokens", "{token}",
        "Tokens of prompts, by whether the prefix cache held them",
        lambda look: {
            "cached": look.tally.cached_tokens,
            "computed": look.tally.prompt_tokens - look.tally.cached_tokens,
        }, "source", is_count=True,
    ),
    Observed(
        "muster.overhead.tokens", "{token}", "Tokens computed by refreshes and prewarms",
        lambda look: look.overhead.computed_tokens, is_count=True,
    ),
    Observed(
        "muster.touches", "{request}", "Requests made to keep or bring back a session's KV",
        lambda look: {
            "refresh": look.overhead.refreshes, "prewarm": look.overhead.prewarms,
            "failed": look.overhead.failures,
        }, "kind", is_count=True,
    ),
    Observed(
        "muster.prewarm.hits", "{step}", "LLM steps that found the prefix that was prewarmed",
        lambda look: look.view.prewarm_hits, is_count=True,
    ),
    Observed(
        "muster.leases.yielded", "{lease}", "Leases that gave way to other work",
        lambda look: look.view.yielded, is_count=True,
    ),
    Observed(
        "muster.engine.preemptions", "{preemption}",
        "Running requests that lost their KV to others",
        lambda look: look.engine.num_preemptions, is_count=True,
    ),
    Observed(
        "muster.steps.shed", "{step}", "LLM steps dropped while they waited",
        lambda look: look.tally.shed, is_count=True,
    ),
    Observed(
        "muster.scheduler.refused_events", "{event}",
        "Events that the scheduler refused: each is a bug",
        lambda look: look.tally.refused_events, is_count=True,
    ),
    Observed(
        "muster.cache.disagreements", "{step}",
        "Returns whose cached tokens were not what the scheduler expected",
        lambda look: look.view.disagreements, is_count=True,
    ),
    Observed(
        "muster.cache.disagreement.tokens", "{token}", "By how many tokens those were wrong in all",
        lambda look: look.view.disagreement_tokens, is_count=True,
    ),
    Observed(
        "muster.session.divergences", "{step}", "Prompts that differed from their session",
        lambda look: look.divergences, is_count=True,
    ),
)  # fmt: skip

STEP_TIME = Recorded(
    "muster.step.time", "s", "Time of finished LLM steps, by part", SECONDS, "part"
)
TIME_TO_FIRST_TOKEN = Recorded(
    "gen_ai.server.time_to_first_token", "s",
    "From a step's arrival in the service to its first token", SECONDS,
)  # fmt: skip
TIME_PER_OUTPUT_TOKEN = Recorded(
    "gen_ai.server.time_per_output_token", "s",
    "Decode time of finished steps for each token after the first", TOKEN_SECONDS,
)  # fmt: skip
REQUEST_DURATION = Recorded(
    "gen_ai.server.request.duration", "s",
    "Time of finished LLM steps in the service, from arrival to commit", SECONDS,
)  # fmt: skip
RECORDED = (STEP_TIME, TIME_TO_FIRST_TOKEN, TIME_PER_OUTPUT_TOKEN, REQUEST_DURATION)


class ServiceMetrics:
    """Measures one service; made on its event loop, collected from any other thread."""

    def __init__(self, meter: Meter, service: InferenceService, *, model: str) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._labels = {"gen_ai.request.model": model}
        self._last: tuple[float, Look] | None = None
        self._histograms = {
            each: meter.create_histogram(
                each.name, each.unit, each.what,
                explicit_bucket_boundaries_advisory=list(each.bounds),
            )
            for each in RECORDED
        }  # fmt: skip
        for each in OBSERVED:
            make = (
                meter.create_observable_counter if each.is_count else meter.create_observable_gauge
            )
            make(each.name, [self._observer(each)], each.unit, each.what)
        service.on_finished = self.finished

    def finished(self, generation: Generation, result: LLMStepResult) -> None:
        """Record the durations of a step that was generated and committed here."""
        timing, labels = result.timing, self._labels
        for name, part_s in timing.model_dump().items():
            part = {STEP_TIME.attribute: name.removesuffix("_s")}
            self._histograms[STEP_TIME].record(part_s, labels | part)
        first_s = generation.first_token_s - generation.created_s
        self._histograms[TIME_TO_FIRST_TOKEN].record(first_s, labels)
        self._histograms[REQUEST_DURATION].record(timing.total_s, labels)
        later_tokens = generation.usage.completion_tokens - 1
        if later_tokens > 0:
            per_token_s = timing.decode_s / later_tokens
            self._histograms[TIME_PER_OUTPUT_TOKEN].record(per_token_s, labels)

    def _observer(self, metric: Observed) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            look = self._look()
            if look is None:
                return []
            value = metric.read(look)
            if isinstance(value, Mapping):
                return [
                    Observation(number, self._labels | {metric.attribute: key})
                    for key, number in value.items()
                ]
            return [Observation(value, self._labels)]

        return observe

    def _look(self) -> Look | None:
        """Have the event loop look; None if it is away, or the engine is."""
        if self._last is None or time.monotonic() - self._last[0] > FRESH_S:
            future = asyncio.run_coroutine_threadsafe(self._looked(), self._loop)
            try:
                self._last = time.monotonic(), future.result(PATIENCE_S)
            except (TimeoutError, MusterError):
                future.cancel()
                return None
        return self._last[1]

    async def _looked(self) -> Look:
        service, dispatcher = self._service, self._service.dispatcher
        engine = await service.engine.stats()
        return Look(
            view=dispatcher.view(),
            tally=dispatcher.tally,
            overhead=dispatcher.touches.overhead,
            gpu=dispatcher.gpu.account(dispatcher.now()),
            engine=engine,
            divergences=service.sessions.divergences,
        )
