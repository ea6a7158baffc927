"""A discrete-event closed loop: agents, a scheduler behind its shell, an engine, virtual time.

Theory of operation. The world is the scheduler's shell, the engine and the agents' tools in one.
Time jumps to the next of: the end of the engine step under way, the next arrival or return of a
tool, the scheduler's `next_wake`. All that happens at one moment is told, then `schedule` is called
once and its decisions are carried out, until the moment is quiet; then the next engine step begins.

The engine's cache is the truth: a step's `cached_tokens` is what the cache holds of it when it
becomes ready, a waiting session is told of each eviction in its cached prefix at the end of the
engine step that did it. A refresh or prewarm is a request like any other, of the session's first
tokens, with the lowest priority. An aborted step comes back after `RETRY_S`, as Temporal's retry.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

from bench.world.engine import EngineModel, WorldEngine
from bench.world.metric import Metrics, Tally
from bench.world.plan import NEVER_S, SessionPlan
from bench.world.session import Place, Session
from contracts.llm_step import FinishReason
from inference_service.engine.simulation import Generation
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
from inference_service.scheduler.protocol import Scheduler
from inference_service.touch_request import TOUCH_PRIORITY

PolicyFactory = Callable[[CapacityChanged], Scheduler]

RETRY_S = 1.0
MAX_WAKES = 100_000
"""Wakes in a row with nothing else to come: then the run counts as stalled."""


@runtime_checkable
class WithPriority(Protocol):
    """A policy that also orders the engine's own queue; else it is first come, first served."""

    def engine_priority(self, step: StepReady) -> int:
        """Return the engine's priority for a step; lower is earlier."""
        ...


class World:
    """Runs sessions to their ends once. `successor` may name one to come when one has ended."""

    def __init__(
        self,
        plans: Iterable[SessionPlan],
        make_policy: PolicyFactory,
        model: EngineModel | None = None,
        successor: Callable[[float], SessionPlan | None] | None = None,
    ) -> None:
        self.model = model or EngineModel()
        self.engine = WorldEngine(self.model)
        self.scheduler = make_policy(self.model.capacity)
        self.now = 0.0
        self.tally = Tally()
        self._prioritise = (
            self.scheduler.engine_priority if isinstance(self.scheduler, WithPriority) else None
        )
        self._openings: dict[str, int] = {}
        self._seen_openings: set[int] = set()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._num_due = 0
        self._num_requests = 0
        self._wake_s = math.inf
        self._told = False
        self._num_ready = 0
        self._steps: dict[str, Session] = {}
        self._of: dict[Generation, Session] = {}
        self._events: dict[str, StepReady] = {}
        self._touches: dict[Generation, tuple[Session, str]] = {}
        self._leaves: dict[str, Session] = {}
        self._watchers: dict[int, dict[Session, None]] = {}
        self._num_open = 0
        self._num_sessions = 0
        self._successor = successor
        for plan in plans:
            self._add(plan)

    def run(self) -> Metrics:
        """Run until every session that can end has ended; returns the figures."""
        wakes = 0
        while self._num_open:
            self._settle()
            if not self._num_open:
                break
            happens_s = min(self.engine.ends_s, self._due[0][0] if self._due else math.inf)
            wakes = wakes + 1 if happens_s == math.inf else 0
            next_s = min(happens_s, self._wake_s)
            if next_s == math.inf or wakes > MAX_WAKES:
                return self._metrics(stalled=True)
            if not self.engine.is_busy:
                self.tally.idle(next_s - self.now, is_ready=self._num_ready > 0)
            self.now = next_s
        return self._metrics(stalled=False)

    def _metrics(self, *, stalled: bool) -> Metrics:
        return self.tally.metrics(
            preemptions=self.engine.simulation.num_preemptions, stalled=stalled
        )

    def _add(self, plan: SessionPlan) -> None:
        self._num_sessions += 1
        opening = self._openings.setdefault(plan.opening, len(self._openings))
        session = Session(plan, self._num_sessions, self.model.block_size, opening)
        self._num_open += not plan.never_ends
        self._at(plan.arrival_s, lambda: self._ready(session))

    # What happens

    def _settle(self) -> None:
        """Let everything of this moment happen, then begin the next engine step."""
        while True:
            self._told = self._wake_s <= self.now
            if self.engine.ends_s <= self.now:
                self._end_engine_step()
            while self._due and self._due[0][0] <= self.now:
                heapq.heappop(self._due)[2]()
            if not self._told:
                break
            for decision in self.scheduler.schedule(self.now):
                self.tally.decided(self.now, decision)
                self._carry_out(decision)
            self._plan_wake()
        until_s = min(self._wake_s, self._due[0][0] if self._due else math.inf)
        self.engine.start(self.now, until_s)

    def _plan_wake(self) -> None:
        wake_s = self.scheduler.next_wake(self.now)
        if wake_s is not None and wake_s <= self.now:
            raise RuntimeError(f"next_wake({self.now!r}) is {wake_s!r}: schedule was just called")
        self._wake_s = math.inf if wake_s is None else wake_s

    def _at(self, time_s: float, happen: Callable[[], None]) -> None:
        self._num_due += 1
        heapq.heappush(self._due, (time_s, self._num_due, happen))

    def _tell(self, event: Event) -> None:
        self.scheduler.receive(event, self.now)
        self._told = True

    def _ready(self, session: Session, *, again: bool = False) -> None:
        if not again:
            is_first = session.opening not in self._seen_openings
            self._seen_openings.add(session.opening)
            leaf = session.leaf
            session.next_step(is_first_of_opening=is_first)
            if session.leaf != leaf and session.index > 0:
                self._forget(session, leaf)
        self._leaves[session.leaf] = session
        session.place, session.ready_s = Place.READY, self.now
        self._num_ready += 1
        cached = self.engine.num_cached(session.whole_keys())
        self._watch(session, cached)
        event = session.ready(cached_tokens=cached)
        self._steps[event.step_id], self._events[event.step_id] = session, event
        self._tell(event)

    def _end_engine_step(self) -> None:
        for generation in self.engine.end():
            done = generation.num_sampled == len(generation.answer)
            if generation in self._touches:
                self._touch_done(generation)
                continue
            session = self._of[generation]
            if generation.first_token_s == self.now and not session.saw_first_token:
                session.saw_first_token = True
                self._tell(FirstToken(session.step_id, generation.num_cached))
            if done:
                self._finished(session, generation)
        self._tell_evictions()

    def _finished(self, session: Session, generation: Generation) -> None:
        del self._of[generation], self._steps[session.step_id], self._events[session.step_id]
        session.generation = None
        assert generation.scheduled_s is not None
        session.attained_s += self.now - generation.scheduled_s
        self.tally.finished(
            prompt=session.tokens,
            cached=generation.num_cached,
            attainable=session.attainable_tokens,
            wait_s=generation.scheduled_s - session.ready_s,
        )
        self._tell(StepFinished(session.step_id, session.finish_step()))
        if session.is_last:
            self._end(session)
            return
        session.place = Place.ACTING
        self._watch(session, self.engine.num_cached(session.whole_keys()))
        self._tell(session.waits())
        if session.step.gap_s != NEVER_S:
            self._at(self.now + session.step.gap_s, lambda: self._ready(session))

    def _end(self, session: Session) -> None:
        session.place = Place.ENDED
        self._forget(session, session.leaf)
        if not session.plan.never_ends:
            self._num_open -= 1
            self.tally.jct_s.append(self.now - session.plan.arrival_s)
            self.tally.last_end_s = self.now
        if self._successor and (plan := self._successor(self.now)):
            self._add(plan)

    def _forget(self, session: Session, leaf: str) -> None:
        self._unwatch(session)
        self._leaves.pop(leaf, None)
        self._tell(SessionEnded(leaf))

    def _touch_done(self, generation: Generation) -> None:
        session, leaf = self._touches.pop(generation)
        prompt = len(generation.token_ids) - 1  # less the sampled one
        self.tally.overhead_tokens += prompt - generation.num_cached + 1
        if session.place in (Place.ACTING, Place.READY):
            self._watch(session, self.engine.num_cached(session.whole_keys()))
        self._tell(TouchDone(leaf, generation.num_cached))

    # Evictions

    def _watch(self, session: Session, cached_tokens: int) -> None:
        """Watch the last cached block of a waiting session."""
        self._unwatch(session)
        if cached_tokens:
            key = session.keys[cached_tokens // self.model.block_size - 1]
            session.watched = key
            self.engine.pool.watch(key)
            self._watchers.setdefault(key, {})[session] = None

    def _unwatch(self, session: Session) -> None:
        key, session.watched = session.watched, None
        if key is not None:
            self.engine.pool.unwatch(key)
            watchers = self._watchers[key]
            del watchers[session]
            if not watchers:
                del self._watchers[key]

    def _tell_evictions(self) -> None:
        lost = self.engine.pool.lost
        if not lost:
            return
        sessions = {s: None for key in lost for s in self._watchers.get(key, ())}
        lost.clear()
        for session in sessions:
            watched = session.watched
            cached = self.engine.num_cached(session.whole_keys())
            self._watch(session, cached)
            if session.watched != watched:  # else another block holds the same
                self._tell(KVEvicted(session.leaf, cached))

    # What the scheduler decides

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Dispatch(cohort):
                self.tally.cohorts += 1
                self.tally.dispatched += len(cohort)
                for step_id in cohort:
                    self._dispatch(step_id)
            case Abort(step_id):
                self._abort(step_id)
            case Refresh(leaf, num_tokens) | Prewarm(leaf, num_tokens):
                self._touch(leaf, num_tokens)
            case Reject(step_id):
                self.tally.rejected += 1
                self._drop(step_id)
            case Shed(step_id):
                self.tally.shed += 1
                self._drop(step_id)

    def _dispatch(self, step_id: str) -> None:
        session = self._steps[step_id]
        assert session.place is Place.READY, step_id
        self._unwatch(session)
        session.place, session.saw_first_token = Place.RUNNING, False
        self._num_ready -= 1
        priority = self._prioritise(self._events[step_id]) if self._prioritise else 0
        generation = self._request(session, session.tokens, session.step.output_tokens, priority)
        session.generation = generation
        self._of[generation] = session

    def _touch(self, leaf: str, num_tokens: int) -> None:
        session = self._leaves[leaf]
        assert session.place in (Place.ACTING, Place.READY), (leaf, session.place)
        assert 0 < num_tokens <= session.tokens, (leaf, num_tokens, session.tokens)
        self.tally.touches += 1
        request = self._request(session, num_tokens, 1, TOUCH_PRIORITY)
        self._touches[request] = (session, leaf)

    def _request(
        self, session: Session, num_tokens: int, num_answer: int, priority: int
    ) -> Generation:
        self._num_requests += 1
        generation = Generation(
            token_ids=[0] * num_tokens,
            answer=[0] * num_answer,
            finish_reason=FinishReason.STOP,
            priority=priority,
            arrival=self._num_requests,
            arrived_s=self.now,
            keys=session.keys,
        )
        self.engine.simulation.add(generation)
        return generation

    def _abort(self, step_id: str) -> None:
        session = self._steps.pop(step_id)
        generation, session.generation = session.generation, None
        assert generation is not None, step_id
        del self._of[generation], self._events[step_id]
        self.engine.simulation.abort(generation)
        session.place = Place.ACTING
        self._at(self.now, lambda: self._tell(StepFailed(step_id)))
        self._at(self.now + RETRY_S, lambda: self._ready(session, again=True))

    def _drop(self, step_id: str) -> None:
        session = self._steps.pop(step_id)
        del self._events[step_id]
        self._num_ready -= 1
        self._at(self.now, lambda: self._end(session))
