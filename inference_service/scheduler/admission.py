"""Who is kept: what admitted sessions will need, and how much room is left to cold work.

A session is kept (its KV is held between its steps) if the predicted peak of all kept sessions
stays under the watermark with it, less the cold room. The forecasts are in `forecast.py`, the
division in `plan.py`; here they are fed and asked.
"""

from __future__ import annotations

import math

from inference_service.scheduler.forecast import MAX_STEPS, LifeModel, Outlook, PeakModel
from inference_service.scheduler.gap import GapModel
from inference_service.scheduler.kv_model import KVModel
from inference_service.scheduler.plan import Load, cold_sessions
from inference_service.scheduler.rate import RateModel
from inference_service.scheduler.session import Session

PLAN_EVERY_S = 1.0
"""Time between two looks at the division of the cache."""

SHARED_OVER = 20
"""Steps that the mean of shared tokens is taken over."""


class Admission:
    """The forecast of kept sessions, and the cold room beside them."""

    def __init__(self, kv: KVModel, gaps: GapModel, rate: RateModel) -> None:
        self.cold = 0.0
        """Sessions' worth of room that is left to cold work."""
        self.cold_blocks = 0.0
        """The same in blocks."""
        self.cold_supply = 0.0
        """Sessions that keep the cold room busy: the others would only wait for it."""
        self.admitted = 0
        """Sessions that have been admitted and are not over."""
        self._kv = kv
        self._gaps = gaps
        self._rate = rate
        self._lives = LifeModel()
        self._peaks = PeakModel()
        self._shared_tokens = 0.0
        self._planned_s = -math.inf

    def keep(self, session: Session) -> None:
        """Count a session, as it is now, among those that are kept."""
        self._peaks.put(session.id, self._outlook(session))

    def drop(self, session: Session) -> None:
        """Count it no more; one that was not counted is no error."""
        self._peaks.drop(session.id)

    def excess(self, session: Session, kept_blocks: int, watermark: int) -> float:
        """Return the blocks by which the predicted peak would pass the watermark with a session.

        `kept_blocks` are those of the sessions kept now and of their running steps.
        """
        unkept = self._kv.unkept_blocks(session.chain)
        candidate = self._outlook(session)
        candidate.private = min(candidate.private, unkept)
        peak = self._peaks.peak(kept_blocks + unkept - candidate.private, candidate)
        return peak - (watermark - self.cold_blocks)

    def step_finished(self, session: Session) -> None:
        """Learn what a step has added: the tools' results before it and its own output."""
        before, session.last_tokens = session.last_tokens, session.tokens
        grown = session.tokens - before if before else 0
        self._lives.step_finished(session.steps, grown, before)
        if before:
            session.growth += (grown - session.growth) / (session.steps - 1)
        private = self._kv.private_blocks(session.chain) * self._kv.block_size
        self._shared_tokens += (session.tokens - private - self._shared_tokens) / SHARED_OVER

    def session_ended(self, session: Session) -> None:
        """Learn how many steps a session has taken."""
        if session.steps:
            self._lives.session_ended(session.steps)

    def plan(self, watermark: int, sessions: int, max_num_seqs: int, now: float) -> None:
        """Decide anew, once in a while, how much room to leave to sessions that are not kept."""
        if now - self._planned_s < PLAN_EVERY_S:
            return
        self._planned_s = now
        block = self._kv.block_size
        context, shared = self._lives.context_tokens(), self._shared_tokens
        to_come = 0.5 * self._lives.growth_share() * self._lives.steps_left(1)
        blocks = max(1.0, (context * (1 + to_come) - shared) / block)
        load = Load(
            room=(watermark - shared / block) / blocks,
            sessions=sessions,
            gap_s=self._gaps.typical_s,
            context_tokens=max(0.0, context - shared),
            new_tokens=self._lives.new_tokens(self._rate.output_tokens),
            output_tokens=self._rate.output_tokens,
            prefill_token_s=self._rate.prefill_token_s,
            decode_base_s=self._rate.decode_base_s,
            decode_each_s=self._rate.decode_each_s,
            max_num_seqs=max_num_seqs,
        )
        self.cold = cold_sessions(load, self.cold)
        self.cold_blocks = self.cold * blocks
        step_s = self._rate.step_s(round(load.context_tokens + load.new_tokens))
        self.cold_supply = self.cold * (1 + load.gap_s / step_s)

    def _outlook(self, session: Session) -> Outlook:
        share = self._lives.growth_share() * session.tokens
        growth = 0.5 * (share + session.growth) if session.growth else share
        return Outlook(
            private=self._kv.private_blocks(session.chain),
            growth=growth / self._kv.block_size,
            steps_left=min(MAX_STEPS, round(self._lives.steps_left(session.steps))),
        )
