"""The ready-cohort scheduler.

Theory of operation (written below once it holds).
"""

from __future__ import annotations

import math

from inference_service.scheduler.decision import (
    Abort,
    Decision,
    Dispatch,
    Refresh,
    Reject,
    Shed,
)
from inference_service.scheduler.event import (
    CapacityChanged,
    EngineLost,
    Event,
    FirstToken,
    GroupResolved,
    KVEvicted,
    SessionEnded,
    SessionIdle,
    StepCancelled,
    StepFailed,
    StepFinished,
    StepReady,
    ToolsStarted,
    TouchDone,
)
from inference_service.scheduler.forecast import MAX_STEPS, LifeModel, Outlook, PeakModel
from inference_service.scheduler.gap import GapModel
from inference_service.scheduler.kv_model import KVModel
from inference_service.scheduler.lease import Leases, Yield
from inference_service.scheduler.line import Line
from inference_service.scheduler.plan import Load, cold_sessions
from inference_service.scheduler.protocol import IllegalEventError
from inference_service.scheduler.rate import RateModel
from inference_service.scheduler.session import Phase, Session, State, Step
from inference_service.scheduler.setting import SchedulerSettings
from inference_service.scheduler.view import SchedulerView


PLAN_EVERY_S = 1.0


class ReadyCohort:
    """The `Scheduler` that Muster serves with."""

    def __init__(
        self, capacity: CapacityChanged, settings: SchedulerSettings | None = None
    ) -> None:
        self._settings = settings or SchedulerSettings()
        self._capacity = capacity
        self._kv = KVModel(capacity.num_blocks, capacity.block_size)
        self._gaps = GapModel()
        self._rate = RateModel()
        self._lives = LifeModel()
        self._peaks = PeakModel()
        self._leases = Leases(self._kv, self._gaps, self._rate)
        self._line = Line(self._settings.tenant_weights)
        self._sessions: dict[str, Session] = {}
        self._engine: dict[str, Step] = {}
        self._tail_blocks = 0
        self._uncomputed = 0
        self._touching: Session | None = None
        self._due: list[Decision] = []
        self._arrivals = 0
        self._admissions = 0
        self._now = -math.inf
        self._yielded = 0
        self._disagreements = 0
        self._disagreement_tokens = 0
        self._wake_s: float | None = None
        self._barrier: tuple[Step, float] | None = None
        self._cold = 0.0
        self._cold_blocks = 0.0
        self._cold_running = 0
        self._cold_running_blocks = 0
        self._shared_tokens = 0.0
        self._planned_s = -math.inf

    # events -----------------------------------------------------------------------------------

    def receive(self, event: Event, now: float) -> None:
        """Note an event. Raises `IllegalEventError`, and changes nothing, if it cannot be."""
        if now < self._now:
            raise IllegalEventError(f"time ran back from {self._now} to {now}")
        match event:
            case StepReady():
                self._step_ready(event, now)
            case StepCancelled(step_id):
                self._step_cancelled(step_id)
            case FirstToken(step_id, cached_tokens):
                self._first_token(step_id, cached_tokens, now)
            case StepFinished():
                self._step_finished(event, now)
            case StepFailed(step_id):
                self._step_failed(step_id, now)
            case ToolsStarted(session_id, tools):
                self._tools_started(session_id, tools, now)
            case SessionIdle(session_id):
                self._session_idle(session_id)
            case SessionEnded(session_id):
                self._session_ended(session_id)
            case TouchDone(session_id, cached_tokens):
                self._touch_done(session_id, cached_tokens)
            case KVEvicted(session_id, cached_tokens):
                self._evicted(session_id, cached_tokens)
            case GroupResolved(group):
                self._line.group_resolved(group)
                self._shed(self._line.of_group(group), "its group is resolved")
            case CapacityChanged():
                self._capacity_changed(event)
            case EngineLost():
                self._engine_lost()
        self._now = now

    def _step_ready(self, ready: StepReady, now: float) -> None:
        if ready.step_id in self._line or ready.step_id in self._engine:
            raise IllegalEventError(f"step {ready.step_id!r} is here already")
        session = self._sessions.get(ready.session)
        if session and session.state in (State.READY, State.RUNNING):
            raise IllegalEventError(f"session {ready.session!r} has a step here already")
        if rejection := self._never_fits(ready):
            self._due.append(rejection)
            return
        if session is None:
            session = self._sessions[ready.session] = Session(ready.session, ready.tenant)
            if not ready.is_new:
                session.admitted = self._next_admission()
        if session.state is State.ACTING:
            self._gaps.come_back(session.id, session.gap_key, now)
            self._leases.back(session)
        session.state = State.READY
        holds = session.holds
        self._leases.release(session)
        session.chain = self._kv.extended(session.chain, ready.path)
        if ready.cached_tokens is not None:
            self._kv.correct(session.chain, ready.cached_tokens)
        if holds:
            self._leases.hold(session)
        self._arrivals += 1
        self._line.add(Step(ready, session, self._arrivals, now))
        self._expect(session)

    def _step_cancelled(self, step_id: str) -> None:
        if step := self._line.get(step_id):
            self._take_out(step)
            return
        step = self._dispatched(step_id)
        if not step.is_aborting:
            step.is_aborting = True
            self._due.append(Abort(step_id))

    def _first_token(self, step_id: str, cached_tokens: int, now: float) -> None:
        step = self._dispatched(step_id)
        if step.phase is not Phase.PREFILL:
            raise IllegalEventError(f"step {step_id!r} has had its first token")
        step.phase = Phase.DECODE
        step.first_token_s = now
        self._uncomputed -= step.uncomputed
        self._rate.first_token(step_id, step.ready.prompt_tokens - cached_tokens, now)
        if step.expected_cached != cached_tokens:
            self._disagreements += 1
            self._disagreement_tokens += abs(step.expected_cached - cached_tokens)

    def _step_finished(self, event: StepFinished, now: float) -> None:
        step = self._dispatched(event.step_id)
        session = step.session
        if event.leaf.end < session.tokens:
            raise IllegalEventError(f"step {step.id!r} ends before its prompt does: {event.leaf}")
        output = event.leaf.end - session.tokens
        session.steps += 1
        self._kv.grow(session.chain[-1], event.leaf.end)
        self._leave_engine(step, output, now)
        if session.holds:
            self._leases.hold(session)
        self._line.member_finished(step.ready.fan_out)
        self._learn_growth(session)
        session.state = State.ACTING
        session.away_since, session.gap_key, session.tools = now, "", ()
        self._expect(session)
        self._plan(now)

    def _step_failed(self, step_id: str, now: float) -> None:
        step = self._dispatched(step_id)
        self._leave_engine(step, 0, now)
        step.session.state = State.IDLE
        self._let_go(step.session)

    def _tools_started(self, session_id: str, tools: tuple[str, ...], now: float) -> None:
        session = self._known(session_id, State.ACTING)
        session.tools = tools
        session.gap_key = self._gaps.leave(session_id, tools, now)
        self._leases.away(session)

    def _session_idle(self, session_id: str) -> None:
        session = self._sessions.get(session_id)
        if session is None:
            return
        if session.state in (State.READY, State.RUNNING):
            raise IllegalEventError(f"session {session_id!r} has a step here")
        self._gaps.give_up(session_id, session.gap_key)
        session.state = State.IDLE
        self._let_go(session)

    def _session_ended(self, session_id: str) -> None:
        session = self._sessions.get(session_id)
        if session is None:
            return
        if session.state in (State.READY, State.RUNNING):
            raise IllegalEventError(f"session {session_id!r} has a step here")
        self._gaps.give_up(session_id, session.gap_key)
        self._lives.session_ended(session.steps)
        self._forget(session)

    def _touch_done(self, session_id: str, cached_tokens: int) -> None:
        if self._touching is None or self._touching.id != session_id:
            raise IllegalEventError(f"session {session_id!r} is not being touched")
        session, self._touching = self._touching, None
        session.is_touching = False
        if cached_tokens >= 0 and session.chain:
            self._kv.correct(session.chain, cached_tokens)
            self._kv.touch(session.chain)

    def _evicted(self, session_id: str, cached_tokens: int) -> None:
        session = self._sessions.get(session_id)
        if session and session.chain:
            self._kv.correct(session.chain, min(cached_tokens, session.tokens))

    def _capacity_changed(self, capacity: CapacityChanged) -> None:
        self._capacity = capacity
        for step in self._line.first(len(self._line)):
            if rejection := self._never_fits(step.ready):
                self._take_out(step)
                self._due.append(rejection)

    def _engine_lost(self) -> None:
        for step in list(self._engine.values()):
            self._leave_engine(step, 0, self._now)
            step.session.state = State.IDLE
            self._let_go(step.session)
        self._rate.lost()
        self._kv.clear()
        self._touching = None

    # decisions --------------------------------------------------------------------------------

    def schedule(self, now: float) -> list[Decision]:
        """Return what is to be done now: ends first, since they make room, then one cohort."""
        assert now >= self._now, (now, self._now)
        self._now = now
        self._wake_s = None
        self._shed(self._line.expired(now), "its time is over")
        self._end_leases(now)
        decisions, self._due = self._due, []
        cohort = self._cohort(now)
        if cohort:
            decisions.append(Dispatch(tuple(step.id for step in cohort)))
        if self._due:
            decisions += self._due
            self._due = []
        return decisions

    def next_wake(self, now: float) -> float | None:
        """Return when time alone may change what is to be done, or None if it cannot."""
        times = [self._line.next_expiry(), self._wake_s]
        return min((time for time in times if time is not None), default=None)

    def _cohort(self, now: float) -> list[Step]:
        """Dispatch every waiting step that may go, in order."""
        cohort: list[Step] = []
        aged, is_due = self._aged(now)
        waiting = self._line.first(self._settings.lookahead)
        if aged:
            waiting = [s for s in waiting if s.session.admitted is not None and s is not aged]
            waiting.insert(0 if is_due else len(waiting), aged)
        for step in waiting:
            if self._seats() <= 0:
                break
            if not self._engine_takes(step):
                continue
            if not self._has_room(step, now, is_due=is_due and step is aged):
                if is_due and step is aged:
                    break
                continue
            if self._refresh_first(step):
                return cohort
            cohort.append(self._enter(step, now))
        if not self._engine and not cohort and len(self._line) and self._touching is None:
            extra = self._worth_yielding(now)
            if extra and not self._refresh_first(extra):
                cohort.append(self._enter(extra, now))
            elif not extra:
                self._wake_s = now + 0.1
        return sorted(cohort, key=lambda step: step.ready.path[0].id)

    def _seats(self) -> int:
        return self._capacity.max_num_seqs + 1 - len(self._engine)

    def _engine_takes(self, step: Step) -> bool:
        """Whether the engine's own queue stays shallow with this step."""
        if not self._uncomputed:
            return True
        uncomputed = step.ready.prompt_tokens - self._kv.cached_tokens(step.session.chain)
        return self._uncomputed + uncomputed <= self._capacity.prefill_tokens

    def _has_room(self, step: Step, now: float, *, is_due: bool) -> bool:
        """Whether the step fits; lets leases give way to it where they must."""
        session = step.session
        if is_due:
            return self._make_room(step, now, after=None)
        if session.admitted is not None:
            if self._make_room(step, now, after=session.admitted):
                return True
        elif self._short(step) <= 0 and (not self._settings.reserve or self._excess(session) <= 0):
            return True
        return self._cold_running < self._cold and self._make_room(step, now, after=None)

    def _make_room(self, step: Step, now: float, after: int | None) -> bool:
        short = self._short(step)
        if short <= 0:
            return True
        found = self._leases.to_yield(short, now, for_session=step.session, after=after)
        if found is None:
            return False
        self._give_way(found)
        return True

    def _worth_yielding(self, now: float) -> Step | None:
        """Return a step that should go though leases must give way: the engine has nothing else."""
        if not self._settings.yielding and len(self._leases):
            return None
        return_s = self._leases.next_return_s(len(self._engine), now)
        for step in self._line.first(8):
            session = step.session
            short = self._short(step)
            found = Yield((), 0, 0.0)
            if short > 0:
                maybe = self._leases.to_yield(short, now, for_session=session)
                if maybe is None:
                    continue
                found = maybe
            loss_s = found.loss_s
            if session.admitted is None and self._settings.reserve:
                share = min(
                    1.0, max(0.0, self._excess(session)) / max(1, self._kv.blocks(session.chain))
                )
                loss_s += share * self._rate.prefill_s(session.tokens)
            uncomputed = session.tokens - self._kv.cached_tokens(session.chain)
            if loss_s < min(self._rate.step_s(uncomputed), return_s):
                self._give_way(found)
                return step
        return None

    def _enter(self, step: Step, now: float) -> Step:
        session = step.session
        self._line.remove(step)
        if session.admitted is None:
            session.admitted = self._next_admission()
            self._line.dispatched(step, now)
        cached = self._kv.cached_tokens(session.chain)
        step.expected_cached = min(
            cached, (session.tokens - 1) // self._kv.block_size * self._kv.block_size
        )
        step.uncomputed = session.tokens - step.expected_cached
        step.tail_blocks = self._tail(step)
        if session.holds or not self._settings.reserve or self._excess(session) <= 0:
            self._leases.hold(session)
        else:
            step.cold_blocks = self._kv.unkept_blocks(session.chain) + step.tail_blocks
            self._cold_running += 1
            self._cold_running_blocks += step.cold_blocks
        step.phase = Phase.PREFILL
        step.dispatched_s = now
        self._kv.enter(session.chain, step.tail_blocks)
        self._tail_blocks += step.tail_blocks
        self._uncomputed += step.uncomputed
        self._rate.entered(now)
        self._engine[step.id] = step
        session.state = State.RUNNING
        self._expect(session)
        return step

    def _leave_engine(self, step: Step, output_tokens: int, now: float) -> None:
        del self._engine[step.id]
        self._rate.left(step.id, output_tokens, now)
        if step.phase is Phase.PREFILL:
            self._uncomputed -= step.uncomputed
        self._tail_blocks -= step.tail_blocks
        if step.cold_blocks:
            self._cold_running -= 1
            self._cold_running_blocks -= step.cold_blocks
        self._kv.leave(step.session.chain)

    def _refresh_first(self, step: Step) -> bool:
        """Whether a lease must be touched before this step allocates; orders that."""
        if not self._settings.refresh:
            return False
        if self._touching is not None:
            return True
        chain = step.session.chain
        missing = self._tail(step) + sum(node.size - node.resident for node in chain)
        if missing + 1 >= self._kv.unheld_free:
            return False
        for holder in self._kv.at_risk(missing + 1):
            session = self._sessions[holder]
            if session is step.session or session.state is State.RUNNING:
                continue
            tokens = self._kv.cached_tokens(session.chain)
            if tokens < session.tokens:
                session.is_touching = True
                self._touching = session
                self._due.append(Refresh(session.id, tokens + 1))
                return True
        return False

    # small parts ------------------------------------------------------------------------------

    def _short(self, step: Step) -> int:
        """Return the blocks that are missing for the step to fit beside all that is kept."""
        need = self._kv.unkept_blocks(step.session.chain) + self._tail(step)
        return need - (self._watermark - self._kv.kept - self._tail_blocks)

    @property
    def _watermark(self) -> int:
        return int(self._settings.watermark * self._capacity.num_blocks)

    def _tail(self, step: Step) -> int:
        """Return the blocks that the step's last prompt tokens and its output will take."""
        output = min(step.ready.max_tokens, round(1.5 * self._rate.output_tokens) + 8)
        block = self._kv.block_size
        tokens = step.ready.prompt_tokens
        return -(-(tokens + output) // block) - tokens // block

    def _excess(self, session: Session) -> float:
        """Return the blocks by which the predicted peak with a new session passes the watermark."""
        candidate = self._outlook(session)
        unkept = self._kv.unkept_blocks(session.chain)
        candidate.private = min(candidate.private, unkept)
        shared = unkept - candidate.private
        kept = self._kv.kept + self._tail_blocks - self._cold_running_blocks
        peak = self._peaks.peak(kept + shared, candidate)
        return peak - (self._watermark - self._cold_blocks)

    def _outlook(self, session: Session) -> Outlook:
        left = self._lives.steps_left(session.steps)
        share = self._lives.growth_share() * session.tokens
        growth = share if not session.growth else 0.5 * (share + session.growth)
        return Outlook(
            private=self._kv.private_blocks(session.chain),
            growth=growth / self._kv.block_size,
            steps_left=min(MAX_STEPS, round(left)),
        )

    def _expect(self, session: Session) -> None:
        """Tell the forecast what is expected of an admitted session."""
        if session.holds:
            self._peaks.put(session.id, self._outlook(session))

    def _learn_growth(self, session: Session) -> None:
        """Learn what a step has added: the tools' results before it and its own output."""
        before, session.last_tokens = session.last_tokens, session.tokens
        grown = session.tokens - before if before else 0
        self._lives.step_finished(session.steps, grown, before)
        private = self._kv.private_blocks(session.chain) * self._kv.block_size
        self._shared_tokens += 0.05 * (session.tokens - private - self._shared_tokens)
        if before:
            session.growth += (grown - session.growth) / (session.steps - 1)

    def _plan(self, now: float) -> None:
        """Decide anew how much room to leave to sessions that are not kept."""
        if now - self._planned_s < PLAN_EVERY_S or not len(self._leases):
            return
        self._planned_s = now
        context = self._lives.context_tokens()
        shared = self._shared_tokens
        to_come = 0.5 * self._lives.growth_share() * self._lives.steps_left(1)
        blocks = max(1.0, (context * (1 + to_come) - shared) / self._kv.block_size)
        load = Load(
            room=(self._watermark - shared / self._kv.block_size) / blocks,
            sessions=len(self._sessions),
            gap_s=self._gaps.typical_s,
            context_tokens=context - shared,
            new_tokens=self._lives.new_tokens(self._rate.output_tokens),
            output_tokens=self._rate.output_tokens,
            prefill_token_s=self._rate.prefill_token_s,
            decode_base_s=self._rate.decode_base_s,
            decode_each_s=self._rate.decode_each_s,
            max_num_seqs=self._capacity.max_num_seqs,
        )
        self._cold = cold_sessions(load, self._cold)
        self._cold_blocks = self._cold * blocks

    def _give_way(self, found: Yield) -> None:
        for session in found.sessions:
            self._leases.release(session)
            self._peaks.drop(session.id)
            self._yielded += 1

    def _end_leases(self, now: float) -> None:
        for session in self._leases.ended(now):
            self._leases.release(session)
            self._peaks.drop(session.id)

    def _let_go(self, session: Session) -> None:
        """Give up a session's claim and its place: it holds nothing while it idles."""
        self._leases.release(session)
        self._peaks.drop(session.id)
        session.admitted = None
        self._forget(session)

    def _forget(self, session: Session) -> None:
        self._leases.release(session)
        self._peaks.drop(session.id)
        self._kv.forget(session.chain)
        session.chain = []
        del self._sessions[session.id]

    def _take_out(self, step: Step) -> None:
        """Remove a waiting step; its session stays if it has been admitted."""
        self._line.remove(step)
        step.session.state = State.IDLE
        self._let_go(step.session)

    def _shed(self, steps: list[Step], reason: str) -> None:
        for step in steps:
            self._take_out(step)
            self._due.append(Shed(step.id, reason))

    def _aged(self, now: float) -> tuple[Step | None, bool]:
        """Return the step that no new session may overtake any more, and whether it is due.

        It is due when leases must give way to it, whatever they are worth.
        """
        patience_s = self._settings.max_overtaken_s / 2
        oldest = self._line.oldest_overtaken()
        if oldest is None or now - oldest[1] < patience_s:
            self._barrier = None
            return None, False
        step = oldest[0]
        if self._barrier is None or self._barrier[0] is not step:
            self._barrier = (step, now)
        return step, now - self._barrier[1] >= patience_s

    def _next_admission(self) -> int:
        self._admissions += 1
        return self._admissions

    def _dispatched(self, step_id: str) -> Step:
        try:
            return self._engine[step_id]
        except KeyError:
            raise IllegalEventError(f"step {step_id!r} is not in the engine") from None

    def _known(self, session_id: str, state: State) -> Session:
        session = self._sessions.get(session_id)
        if session is None or session.state is not state:
            raise IllegalEventError(f"session {session_id!r} is not {state}")
        return session

    def _never_fits(self, ready: StepReady) -> Reject | None:
        limits = {
            "the model's context window": self._capacity.max_model_len,
            "the KV cache": self._watermark * self._capacity.block_size,
        }
        what, limit = min(limits.items(), key=lambda item: item[1])
        size = ready.prompt_tokens + ready.max_tokens
        return Reject(ready.step_id, what, size, limit) if size > limit else None

    # questions --------------------------------------------------------------------------------

    def retry_after_s(self) -> float | None:
        """Return None if a step of a new session would be taken, else when to ask again."""
        kv_tokens = self._capacity.num_blocks * self._capacity.block_size
        if self._line.queued_tokens <= self._settings.max_queued_kv * kv_tokens:
            return None
        return min(60.0, max(1.0, self._rate.prefill_s(self._line.queued_tokens)))

    def start_window(self) -> int:
        """Return how many steps of new sessions the service may hold at once."""
        in_engine = sum(1 for step in self._engine.values() if step.ready.is_new)
        return in_engine + self._settings.max_waiting

    def place_in_line(self, step_id: str) -> int | None:
        """Return how many ready steps go before this one, or None if it is not waiting."""
        return self._line.place(step_id)

    def counts(self) -> tuple[int, int]:
        """Return the number of steps that are (ready, in the engine)."""
        return len(self._line), len(self._engine)

    def view(self, now: float) -> SchedulerView:
        """Return a snapshot for people."""
        ready, running = self.counts()
        return SchedulerView(ready=ready, running=running, gaps=self._gaps.views(now))
