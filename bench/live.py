"""The closed loop of `bench.world` in wall time: the same agents, a policy, and any engine.

The loop is the scheduler's shell, cut to what a bench needs: it tells events, calls `schedule` once
per turn of the event loop, and carries out every decision. Token ids are made up from the seed; an
answer always has its planned length, whatever the model says, so that policies stay comparable.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from bench.world.metric import Metrics, Tally
from bench.world.plan import NEVER_S, SessionPlan
from bench.world.session import Place, Session
from bench.world.world import RETRY_S, PolicyFactory, WithPriority
from inference_service.engine.protocol import Engine, EngineOutput, EngineRequest
from inference_service.scheduler.decision import (
    Abort,
    Decision,
    Dispatch,
    Prewarm,
    Refresh,
    Reject,
    Shed,
)
from inference_service.scheduler.event import (
    CapacityChanged,
    Event,
    FirstToken,
    KVEvicted,
    SessionEnded,
    StepFailed,
    StepFinished,
    StepReady,
    TouchDone,
)
from inference_service.touch_request import TOUCH_PRIORITY

IDLE_POLL_S = 0.02


class _DroppedError(Exception):
    """The scheduler rejected or shed the session's step."""


@dataclass(eq=False, slots=True)
class _Live:
    """A session with its tokens. `go` is set when its step may run, or fails when it is dropped."""

    session: Session
    token_ids: list[int] = field(default_factory=list[int])
    event: StepReady | None = None
    go: asyncio.Future[None] | None = None
    generating: asyncio.Task[EngineOutput] | None = None
    dispatched_s: float = 0.0
    sampled: list[int] = field(default_factory=list[int])


class LiveLoop:
    """Runs sessions once over a started, idle engine whose cache is empty.

    Times are seconds of the workload; one takes `time_scale` seconds of the wall.
    """

    def __init__(
        self,
        plans: Iterable[SessionPlan],
        make_policy: PolicyFactory,
        engine: Engine,
        capacity: CapacityChanged,
        *,
        vocabulary: range,
        seed: int = 0,
        time_scale: float = 1.0,
    ) -> None:
        self.tally = Tally()
        self._plans = list(plans)
        self._scheduler = make_policy(capacity)
        self._engine = engine
        self._block_size = capacity.block_size
        self._vocabulary = vocabulary
        self._seed = seed
        self._scale = time_scale
        self._start_s = 0.0
        self._openings: dict[str, int] = {}
        self._seen: set[int] = set()
        self._steps: dict[str, _Live] = {}
        self._leaves: dict[str, _Live] = {}
        self._is_due = False
        self._wake: asyncio.TimerHandle | None = None
        self._num_ready = 0
        self._num_in_engine = 0
        self._num_touches = 0
        self._idle_since: float | None = 0.0
        self._touches: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] | None = None
        # the engine's KV events, where it tells them
        self._mirror: Any = getattr(engine, "cache", None)

    async def run(self, limit_s: float = 7_200.0) -> Metrics:
        """Run until every session that can end has; those not done within `limit_s` stalled."""
        loop = asyncio.get_running_loop()
        self._start_s, self._failure = loop.time(), loop.create_future()
        preempted = await self._preemptions()
        if self._mirror is not None:
            self._mirror.on_evicted = self._evicted
        agents = [loop.create_task(self._agent(plan)) for plan in self._plans]
        ending = [a for a, plan in zip(agents, self._plans, strict=True) if not plan.never_ends]
        done = asyncio.gather(*ending)
        try:
            async with asyncio.timeout(limit_s * self._scale):
                ends: list[asyncio.Future[Any]] = [done, self._failure]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                await (self._failure if self._failure.done() else done)
            stalled = False
        except TimeoutError:
            stalled = True
        finally:
            if self._wake:
                self._wake.cancel()
            left = [*agents, *self._touches]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        await self._empty_engine()
        preemptions = await self._preemptions() - preempted
        return self.tally.metrics(preemptions=preemptions, stalled=stalled)

    async def _preemptions(self) -> int:
        return int(getattr(await self._engine.stats(), "num_preemptions", 0))

    async def _empty_engine(self) -> None:
        """Wait until the engine is idle, and empty its cache."""
        if self._mirror is not None:
            self._mirror.on_evicted = None
        engine: Any = self._engine
        while not await engine.reset_prefix_cache():  # noqa: ASYNC110 # another process's state
            await asyncio.sleep(IDLE_POLL_S)

    def _now(self) -> float:
        return (asyncio.get_running_loop().time() - self._start_s) / self._scale

    async def _sleep(self, span_s: float) -> None:
        await asyncio.sleep(max(0.0, span_s) * self._scale)

    # An agent's life

    async def _agent(self, plan: SessionPlan) -> None:
        await self._sleep(plan.arrival_s - self._now())
        opening = self._openings.setdefault(plan.opening, len(self._openings))
        session = Session(plan, len(self._leaves) + 1, self._block_size, opening)
        live = _Live(session)
        while True:
            self._next_step(live)
            try:
                await self._generated(live)
            except _DroppedError:
                break
            if session.is_last:
                break
            self._tell(session.waits())
            if session.step.gap_s == NEVER_S:
                return
            await self._sleep(session.step.gap_s)
        session.place = Place.ENDED
        self._unwatch(live)
        self._tell(SessionEnded(session.leaf))
        if not plan.never_ends:
            self.tally.jct_s.append(self._now() - plan.arrival_s)
            self.tally.last_end_s = self._now()

    def _next_step(self, live: _Live) -> None:
        """Go on to the next step: cut the context where the plan says so, append what is new."""
        session, leaf = live.session, live.session.leaf
        is_first = session.opening not in self._seen
        self._seen.add(session.opening)
        session.next_step(is_first_of_opening=is_first)
        if session.leaf != leaf and session.index > 0:
            self._unwatch(live, leaf)
            self._tell(SessionEnded(leaf))
        self._leaves[session.leaf] = live
        kept = session.tokens - session.step.new_tokens
        del live.token_ids[kept:]
        if session.index == 0:
            live.token_ids += self._made_up(
                f"opening/{session.plan.opening}", session.plan.shared_tokens
            )
        rest = session.tokens - len(live.token_ids)
        live.token_ids += self._made_up(f"{self._seed}/{session.step_id}", rest)

    def _made_up(self, name: str, count: int) -> list[int]:
        return random.Random(name).choices(self._vocabulary, k=count)

    async def _generated(self, live: _Live) -> None:
        """Take the session's step through the scheduler and the engine, again if it is aborted."""
        session = live.session
        while True:
            self._ready(live)
            assert live.go is not None
            await live.go
            self._enter_engine(1)
            generating = asyncio.create_task(self._generate(live))
            live.generating = generating
            try:
                await asyncio.wait([generating])
            finally:
                generating.cancel()
                live.generating = None
                self._enter_engine(-1)
            if not generating.cancelled():
                self._finished(live, generating.result())
                return
            session.place = Place.ACTING
            del self._steps[session.step_id]
            self._tell(StepFailed(session.step_id))
            await self._sleep(RETRY_S)

    def _ready(self, live: _Live) -> None:
        session = live.session
        session.place, session.ready_s = Place.READY, self._now()
        live.go = asyncio.get_running_loop().create_future()
        cached = self._mirror.num_cached_tokens(live.token_ids) if self._mirror else None
        live.event = session.ready(cached_tokens=cached)
        self._watch(live)
        self._steps[session.step_id] = live
        self._count_idle()
        self._num_ready += 1
        self._tell(live.event)

    async def _generate(self, live: _Live) -> EngineOutput:
        """Run the step in the engine; returns the last piece."""
        session = live.session
        assert live.event is not None
        by_priority = isinstance(self._scheduler, WithPriority)
        request = EngineRequest(
            f"{self._seed}/{session.step_id}/{self._now():.6f}",
            list(live.token_ids),
            session.step.output_tokens,
            priority=self._scheduler.engine_priority(live.event) if by_priority else 0,  # type: ignore[attr-defined] # it is checked
        )
        live.sampled = []
        piece = EngineOutput()
        async with aclosing(self._engine.generate(request)) as outputs:
            async for piece in outputs:
                if piece.token_ids and not live.sampled:
                    self._tell(FirstToken(session.step_id, piece.num_cached_tokens))
                live.sampled += piece.token_ids
        return piece

    def _finished(self, live: _Live, last: EngineOutput) -> None:
        session = live.session
        del self._steps[session.step_id]
        timing = last.timing
        if timing is not None:
            session.attained_s += (timing.prefill_s + timing.decode_s) / self._scale
        self.tally.finished(
            prompt=session.tokens,
            cached=last.num_cached_tokens,
            attainable=session.attainable_tokens,
            wait_s=live.dispatched_s
            - session.ready_s
            + (timing.queue_s / self._scale if timing else 0.0),
        )
        wanted = session.step.output_tokens
        lacking = self._made_up(session.step_id, wanted - len(live.sampled))
        live.token_ids += [*live.sampled[:wanted], *lacking]
        leaf = session.finish_step()
        assert len(live.token_ids) == session.tokens, session.step_id
        session.place = Place.ACTING
        self._tell(StepFinished(session.step_id, leaf))
        if not session.is_last:
            self._watch(live)

    # Idle time

    def _count_idle(self) -> None:
        """Count the time since the last change; called before `_num_ready` or the load changes."""
        now = self._now()
        if self._idle_since is not None:
            self.tally.idle(now - self._idle_since, is_ready=self._num_ready > 0)
            self._idle_since = now

    def _enter_engine(self, change: int) -> None:
        self._count_idle()
        self._num_in_engine += change
        self._idle_since = None if self._num_in_engine else self._now()

    # The cache's mirror

    def _watch(self, live: _Live) -> None:
        if self._mirror is not None:
            self._mirror.watch(live.session.leaf, live.token_ids)

    def _unwatch(self, live: _Live, leaf: str = "") -> None:
        if self._mirror is not None:
            self._mirror.unwatch(leaf or live.session.leaf)

    def _evicted(self, leaf: str) -> None:
        live = self._leaves[leaf]
        if live.session.place in (Place.ACTING, Place.READY):
            cached = self._mirror.num_cached_tokens(live.token_ids)
            self._tell(KVEvicted(leaf, cached or 0))

    # The scheduler

    def _tell(self, event: Event) -> None:
        self._guarded(lambda: self._scheduler.receive(event, self._now()))
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._schedule)

    def _guarded(self, call: Callable[[], None]) -> None:
        """Let a failure of the scheduler end the run, wherever it was called."""
        try:
            call()
        except Exception as error:
            if self._failure is not None and not self._failure.done():
                self._failure.set_exception(error)

    def _schedule(self) -> None:
        self._is_due = False
        self._guarded(self._carry_all_out)

    def _carry_all_out(self) -> None:
        now = self._now()
        for decision in self._scheduler.schedule(now):
            self.tally.decided(0.0, decision)
            self._carry_out(decision, now)
        if self._wake:
            self._wake.cancel()
        wake_s = self._scheduler.next_wake(now)
        if wake_s is not None:
            at_s = self._start_s + wake_s * self._scale
            self._wake = asyncio.get_running_loop().call_at(at_s, self._schedule)

    def _carry_out(self, decision: Decision, now: float) -> None:
        match decision:
            case Dispatch(cohort):
                self.tally.cohorts += 1
                self.tally.dispatched += len(cohort)
                for step_id in cohort:
                    self._dispatch(self._steps[step_id], now)
            case Abort(step_id):
                generating = self._steps[step_id].generating
                if generating is not None:
                    generating.cancel()
            case Refresh(leaf, num_tokens) | Prewarm(leaf, num_tokens):
                task = asyncio.get_running_loop().create_task(self._touch(leaf, num_tokens))
                self._touches.add(task)
                task.add_done_callback(self._touches.discard)
            case Reject(step_id):
                self.tally.rejected += 1
                self._drop(step_id)
            case Shed(step_id):
                self.tally.shed += 1
                self._drop(step_id)

    def _dispatch(self, live: _Live, now: float) -> None:
        assert live.go is not None
        self._unwatch(live)
        self._count_idle()
        self._num_ready -= 1
        live.session.place, live.dispatched_s = Place.RUNNING, now
        live.go.set_result(None)

    def _drop(self, step_id: str) -> None:
        live = self._steps.pop(step_id)
        assert live.go is not None
        self._count_idle()
        self._num_ready -= 1
        live.go.set_exception(_DroppedError())

    async def _touch(self, leaf: str, num_tokens: int) -> None:
        live = self._leaves[leaf]
        self._num_touches += 1
        self.tally.touches += 1
        prompt = live.token_ids[:num_tokens]
        name = f"touch/{self._num_touches}/{self._now():.6f}"
        request = EngineRequest(name, prompt, 1, priority=TOUCH_PRIORITY)
        self._enter_engine(1)
        cached = -1
        try:
            async with aclosing(self._engine.generate(request)) as outputs:
                async for piece in outputs:
                    cached = piece.num_cached_tokens
        finally:
            self._enter_engine(-1)
        self.tally.overhead_tokens += len(prompt) - max(0, cached) + 1
        if live.session.place in (Place.ACTING, Place.READY):
            self._watch(live)
        self._tell(TouchDone(leaf, cached))
