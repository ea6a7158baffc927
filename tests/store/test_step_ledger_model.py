"""Any sequence of claims, commits, closes and late reports leaves what a simple model says."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from contracts.llm_step import LLMStepInput, Usage
from store.database import Database
from store.step_ledger import (
    AlreadyFinished,
    AttemptOutcome,
    Claimed,
    StepInputChangedError,
    StepLedger,
)
from tests.store.sample import step_input, step_result, token_run

RUNNING, FINISHED = AttemptOutcome.RUNNING, AttemptOutcome.FINISHED
ABANDONED, FAILED = AttemptOutcome.ABANDONED, AttemptOutcome.FAILED
ENDED = st.sampled_from([FAILED, ABANDONED, AttemptOutcome.CANCELLED, AttemptOutcome.HANDED_BACK])
TOKENS = st.integers(0, 50)
EPOCHS = st.integers(1, 6)


@dataclass
class Row:
    """One attempt as the model has it: `past` is what its claim told, `own` its tokens so far."""

    token: bytes
    past: int
    outcome: AttemptOutcome = RUNNING
    own: int = 0


@dataclass
class Model:
    """The rows of one step, by epoch, and the answer that was accepted."""

    rows: list[Row] = field(default_factory=list)
    answer: str | None = None

    def row(self, epoch: int) -> Row | None:
        return self.rows[epoch - 1] if epoch <= len(self.rows) else None


class LedgerMachine(RuleBasedStateMachine):
    """Runs each rule on the real ledger and on the model."""

    runner: asyncio.Runner
    ledger: StepLedger
    numbers = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).numbers += 1
        self.step: LLMStepInput = step_input(f"job-{self.numbers}/b/1")
        self.model = Model()

    def run(self, call: Any) -> Any:
        return self.runner.run(call)

    @rule(token=st.sampled_from([b"a", b"b", b"c"]))
    def claim(self, token: bytes) -> None:
        rows = self.model.rows
        claimed = self.run(
            self.ledger.claim(step=self.step, digest="d", replica="r", task_token=token)
        )
        if self.model.answer is not None:
            assert isinstance(claimed, AlreadyFinished)
            assert claimed.result.message is not None
            assert claimed.result.message.content == self.model.answer
            return
        is_same_claim = bool(rows) and rows[-1].outcome is RUNNING and rows[-1].token == token
        if not is_same_claim:
            past = sum(row.own for row in rows)
            for row in rows:
                row.outcome = ABANDONED if row.outcome is RUNNING else row.outcome
            rows.append(Row(token, past))
        assert isinstance(claimed, Claimed)
        assert claimed.epoch == len(rows)
        assert claimed.past.completion_tokens == rows[-1].past
        assert claimed.failures == [row.outcome for row in rows].count(FAILED)

    @rule()
    def claim_with_another_input(self) -> None:
        if self.model.rows:
            with pytest.raises(StepInputChangedError):
                self.run(
                    self.ledger.claim(step=self.step, digest="x", replica="r", task_token=b"x")
                )

    @rule(epoch=EPOCHS, tokens=TOKENS)
    def progress(self, epoch: int, tokens: int) -> None:
        usage = Usage(completion_tokens=tokens)
        self.run(self.ledger.progress(self.step.step_id, epoch, usage))
        row = self.model.row(epoch)
        if row and row.outcome is RUNNING:
            row.own = tokens

    @rule(epoch=EPOCHS, tokens=TOKENS, outcome=ENDED)
    def close(self, epoch: int, tokens: int, outcome: AttemptOutcome) -> None:
        usage = Usage(completion_tokens=tokens)
        self.run(self.ledger.close_attempt(self.step.step_id, epoch, outcome, usage))
        row = self.model.row(epoch)
        if row and row.outcome in (RUNNING, ABANDONED):
            row.own = tokens
            row.outcome = outcome if row.outcome is RUNNING else ABANDONED

    @rule(epoch=EPOCHS, tokens=TOKENS, answer=st.sampled_from(["one", "two"]))
    def commit(self, epoch: int, tokens: int, answer: str) -> None:
        row = self.model.row(epoch)
        total = Usage(completion_tokens=(row.past if row else 0) + tokens)
        result, messages = step_result(self.step, epoch, total, answer)
        accepted = self.run(
            self.ledger.commit(
                result, parent=None, append=messages, run=token_run(self.step, [tokens])
            )
        )
        if row and row.outcome is RUNNING:
            row.outcome, row.own, self.model.answer = FINISHED, tokens, answer
        elif row and row.outcome is ABANDONED:
            row.own = tokens
        assert accepted == (row is not None and row.outcome is FINISHED)

    @invariant()
    def ledger_equals_the_model(self) -> None:
        found = self.run(self.ledger.attempts(self.step.step_id))
        assert [(row.epoch, row.outcome, row.usage.completion_tokens) for row in found] == [
            (epoch, row.outcome, row.own) for epoch, row in enumerate(self.model.rows, start=1)
        ]


def test_ledger_equals_its_model_after_any_sequence(database_url: str) -> None:
    with asyncio.Runner() as runner:
        database = Database(database_url)
        LedgerMachine.runner, LedgerMachine.ledger = runner, StepLedger(database)
        try:
            run_state_machine_as_test(
                LedgerMachine,
                settings=settings(
                    max_examples=40,
                    stateful_step_count=25,
                    deadline=None,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            runner.run(database.close())
