"""Room in the KV cache: what is kept and what runs, and whether a step may come beside it.

A step's need is its context's blocks that nobody keeps yet, and its tail: the block its prompt ends
in and those of its output. Running steps' needs can never be taken back, so all that runs stays
under the watermark; kept sessions that do not run give way by the rules of `fits`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from inference_service.scheduler.admission import Admission
from inference_service.scheduler.event import CapacityChanged
from inference_service.scheduler.kv_model import KVModel
from inference_service.scheduler.lease import Leases, Yield
from inference_service.scheduler.rate import RateModel
from inference_service.scheduler.session import Session, Step
from inference_service.scheduler.setting import SchedulerSettings

NOTHING = Yield((), 0, 0.0)

OUTPUT_MARGIN = 1.5
OUTPUT_SPARE_TOKENS = 8
"""A step is expected to generate the mean times the first, and the second more."""


class Room:
    """The blocks of one engine, divided between running steps and kept sessions."""

    def __init__(
        self,
        capacity: CapacityChanged,
        settings: SchedulerSettings,
        kv: KVModel,
        leases: Leases,
        admission: Admission,
        rate: RateModel,
    ) -> None:
        self.capacity = capacity
        self.yielded = 0
        """Leases that have given way so far."""
        self._settings = settings
        self._kv = kv
        self._leases = leases
        self._admission = admission
        self._rate = rate
        self._tail_blocks = 0
        self._cold_steps = 0
        self._cold_blocks = 0

    @property
    def watermark(self) -> int:
        """Blocks that planned work may fill."""
        return int(self._settings.watermark * self.capacity.num_blocks)

    @property
    def working_set(self) -> int:
        """Blocks of all that is kept or runs, shared ones counted once."""
        return self._kv.kept + self._tail_blocks

    @property
    def running(self) -> int:
        """Blocks of the steps in the engine."""
        return self._kv.running + self._tail_blocks

    def tail(self, step: Step) -> int:
        """Return the blocks that the prompt's last tokens and the output will take."""
        usual = round(OUTPUT_MARGIN * self._rate.output_tokens) + OUTPUT_SPARE_TOKENS
        output = min(step.ready.max_tokens, usual)
        block, tokens = self._kv.block_size, step.ready.prompt_tokens
        return -(-(tokens + output) // block) - tokens // block

    def missing(self, step: Step) -> int:
        """Return the blocks that the engine will allocate for a step."""
        return self.tail(step) + self._kv.missing_blocks(step.session.chain)

    def size(self, step: Step) -> tuple[int, int]:
        """Return a step's need in blocks, and the length of its prompt in tokens."""
        need = self._kv.unkept_blocks(step.session.chain) + self.tail(step)
        return need, step.ready.prompt_tokens

    def fits(self, step: Step, now: float, *, is_due: bool) -> bool:
        """Whether a step fits now; lets leases give way to it where the rules say so.

        To one that is due all give way. To a continuation those admitted later do. A new session
        goes if it can be kept. Cold work goes, and takes its room back, while less of it runs than
        the plan leaves room for.
        """
        session, short = step.session, self._short(step)
        if is_due:
            return self._make_room(short, session, now, after=None, of_all=True)
        if session.admitted is not None:
            if self._make_room(short, session, now, after=session.admitted):
                return True
        elif short <= 0 and self._can_be_kept(session):
            return True
        else:
            cold_sessions = self._admission.admitted - len(self._leases)
            if cold_sessions >= self._admission.cold_supply:
                return False
        has_cold_room = self._cold_steps < self._admission.cold
        return has_cold_room and self._make_room(short, session, now, after=None)

    def worth_yielding(self, steps: Iterable[Step], now: float) -> Step | None:
        """Return the first step that should run in an idle engine, whatever must give way to it.

        It should if that loses less than waiting would: the shorter of its own time and the
        expected time until a session that is kept comes back. Where none will, nothing is lost.
        """
        if not self._settings.yielding and len(self._leases):
            return None
        return_s = self._leases.next_return_s(now)
        for step in steps:
            session = step.session
            short = self._short(step)
            found = NOTHING
            if short > 0:
                maybe = self._leases.to_yield(short, now, for_session=session)
                maybe = maybe or self._leases.to_yield(short, now, for_session=session, of_all=True)
                if maybe is None:
                    continue
                found = maybe
            loss_s = found.loss_s + self._future_loss_s(session)
            uncomputed = session.tokens - self._kv.cached_tokens(session.chain)
            if return_s == math.inf or loss_s <= min(self._rate.step_s(uncomputed), return_s):
                self._give_way(found)
                return step
        return None

    def enter(self, step: Step) -> None:
        """Give a step its blocks; its session is kept from now on if the forecast allows that."""
        session = step.session
        step.tail_blocks = self.tail(step)
        if session.holds or self._can_be_kept(session):
            self._leases.hold(session)
            self._admission.keep(session)
        else:
            step.cold_blocks = self._kv.unkept_blocks(session.chain) + step.tail_blocks
            self._cold_steps += 1
            self._cold_blocks += step.cold_blocks
        self._kv.enter(session.chain, step.tail_blocks)
        self._tail_blocks += step.tail_blocks

    def leave(self, step: Step) -> None:
        """Take a step's blocks back; those of a session that is kept stay kept."""
        self._tail_blocks -= step.tail_blocks
        if step.cold_blocks:
            self._cold_steps -= 1
            self._cold_blocks -= step.cold_blocks
        self._kv.leave(step.session.chain)

    def release(self, session: Session) -> None:
        """Keep a session no more."""
        self._leases.release(session)
        self._admission.drop(session)

    def _short(self, step: Step) -> int:
        """Return the blocks that are missing for a step to fit beside all that is kept."""
        return self.size(step)[0] - (self.watermark - self.working_set)

    def _make_room(
        self, short: int, session: Session, now: float, after: int | None, *, of_all: bool = False
    ) -> bool:
        """Let leases give way for a session that `short` blocks are missing for."""
        if short <= 0:
            return True
        found = self._leases.to_yield(short, now, for_session=session, after=after, of_all=of_all)
        if found is None:
            return False
        self._give_way(found)
        return True

    def _can_be_kept(self, session: Session) -> bool:
        return not self._settings.reserve or self._excess(session) <= 0

    def _excess(self, session: Session) -> float:
        cold = min(self._cold_blocks, round(self._admission.cold_blocks))
        kept = self.working_set - cold
        return self._admission.excess(session, kept, self.watermark)

    def _future_loss_s(self, session: Session) -> float:
        """Return the prefill that a new session will need again, since it cannot be kept."""
        if session.admitted is not None or not self._settings.reserve:
            return 0.0
        share = max(0.0, self._excess(session)) / max(1, self._kv.blocks(session.chain))
        return min(1.0, share) * self._rate.prefill_s(session.tokens)

    def _give_way(self, found: Yield) -> None:
        for session in found.sessions:
            self.release(session)
            self.yielded += 1
