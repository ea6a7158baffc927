"""The ledger of LLM steps: who owns a step now, what it cost, and its one accepted result.

Each attempt is a row (step id, epoch). Rules, in the order they matter:

1. At most one row of a step is RUNNING, the one of highest epoch; at most one is FINISHED, for ever
   (a partial unique index says so too).
2. A claim makes the next epoch and turns an older RUNNING row ABANDONED. A finished step cannot be
   claimed: its result comes back instead.
3. A commit succeeds only for the RUNNING row of its epoch, so a late result of an older owner is
   dropped, and its tokens stay in its own row as waste.
4. Whatever is sent twice because its answer was lost changes nothing the second time.

The first claim of a step, nearly every one, is a single INSERT. Later claims lock the step's first
row, which always exists then, so two of them at once are served one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from contracts.llm_step import LLMStepInput, LLMStepResult, Outcome, Usage
from contracts.message import Message
from store.attempt import (
    MAX_ERROR_CHARS,
    AlreadyFinished,
    Attempt,
    AttemptOutcome,
    Claimed,
    Orphan,
    StepInputChangedError,
)
from store.context import TokenRun, chain, insert_nodes, node_values, pack_token_ids
from store.database import Database, storable
from store.schema import step_ledger, token_runs

__all__ = [
    "AlreadyFinished",
    "Attempt",
    "AttemptOutcome",
    "Claimed",
    "Orphan",
    "StepInputChangedError",
    "StepLedger",
    "TokenRun",
]

_RUNNING = AttemptOutcome.RUNNING.value
_FINISHED = AttemptOutcome.FINISHED.value
_ABANDONED = AttemptOutcome.ABANDONED.value

_table = step_ledger.c
_at_row = (_table.step_id == sa.bindparam("at_step")) & (_table.epoch == sa.bindparam("at_epoch"))
_of_step = _table.step_id == sa.bindparam("at_step")

_CLAIM_FIRST = (
    insert(step_ledger)
    .values(epoch=1, outcome=_RUNNING)
    .on_conflict_do_nothing()
    .returning(_table.epoch)
)
_CLAIM_NEXT = insert(step_ledger).values(outcome=_RUNNING)
_LOCK_STEP = sa.select(_table.digest).where(_of_step & (_table.epoch == 1)).with_for_update()
_ABANDON = (
    sa.update(step_ledger)
    .where(_of_step & (_table.outcome == _RUNNING))
    .values(outcome=_ABANDONED, lower_bound=True, ended_at=sa.func.now())
)
_READ_STEP = sa.select(step_ledger).where(_of_step).order_by(_table.epoch)
_ATTACH = (
    sa.update(step_ledger)
    .where(_at_row & (_table.outcome == _RUNNING))
    .values(task_token=sa.bindparam("new_token"))
)
_ABANDON_ORPHANS = (
    sa.update(step_ledger)
    .where((_table.replica == sa.bindparam("of_replica")) & (_table.outcome == _RUNNING))
    .values(
        outcome=_ABANDONED,
        lower_bound=True,
        ended_at=sa.func.now(),
        error="its replica was restarted",
    )
    .returning(_table.step_id, _table.epoch, _table.task_token)
)


_COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens", "wasted_tokens")
_PAST_COLUMNS = {
    "prompt_tokens": "past_prompt_tokens",
    "cached_tokens": "past_cached_tokens",
    "completion_tokens": "past_completion_tokens",
    "wasted_tokens": "past_completion_tokens",  # nothing that earlier attempts made was kept
}


def _used(name: str) -> sa.BindParameter[int]:
    return sa.bindparam(f"used_{name}", type_=sa.BigInteger)


def _usage_values(usage: Usage | None) -> dict[str, Any]:
    """Return the parameters `used_…`; None keeps the counts on record, which are a lower bound."""
    counts = {f"used_{name}": getattr(usage, name, None) for name in _COUNTS}
    return {**counts, "used_lower_bound": usage is None or usage.lower_bound}


_PROGRESS = (
    sa.update(step_ledger)
    .where(_at_row & (_table.outcome == _RUNNING))
    .values(lower_bound=True, **{name: _used(name) for name in _COUNTS})
)
_CLOSE = (
    sa.update(step_ledger)
    .where(_at_row & _table.outcome.in_([_RUNNING, _ABANDONED]))
    .values(
        outcome=sa.case((_table.outcome == _RUNNING, sa.bindparam("closed_as")), else_=_ABANDONED),
        error=sa.bindparam("why"),
        ended_at=sa.func.coalesce(_table.ended_at, sa.func.now()),
        lower_bound=sa.bindparam("used_lower_bound"),
        **{name: sa.func.coalesce(_used(name), _table[name]) for name in _COUNTS},
    )
)
_READ_ROW = sa.select(step_ledger).where(_at_row)


def _commit_statement() -> sa.Executable:
    """Return the commit: the ledger row if it is still ours and, only then, nodes and tokens."""
    own = {
        name: sa.func.greatest(_used(name) - _table[past], 0)
        for name, past in _PAST_COLUMNS.items()
    }
    won = (
        sa.update(step_ledger)
        .where(_at_row & (_table.outcome == _RUNNING))
        .values(
            outcome=_FINISHED,
            result=sa.bindparam("result_json"),
            head=sa.bindparam("new_head", type_=sa.Text),
            ended_at=sa.func.now(),
            lower_bound=False,
            **own,
        )
        .returning(_table.step_id)
        .cte("won")
    )
    is_won = sa.exists(sa.select(won.c.step_id))
    run = (
        insert(token_runs)
        .from_select(
            ["step_id", "parent", "tokenizer", "token_ids"],
            sa.select(
                won.c.step_id,
                sa.bindparam("run_parent", type_=sa.Text),
                sa.bindparam("tokenizer", type_=sa.Text),
                sa.bindparam("token_ids", type_=sa.LargeBinary),
            ),
        )
        .on_conflict_do_nothing()
        .returning(token_runs.c.step_id)
        .cte("run")
    )
    return sa.select(is_won.label("won")).add_cte(insert_nodes(only_if=is_won), run)


_COMMIT = _commit_statement()


class StepLedger:
    """Claims, commits and closes attempts; each call is one transaction and safe to repeat."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def claim(
        self, *, step: LLMStepInput, digest: str, replica: str, task_token: bytes
    ) -> Claimed | AlreadyFinished:
        """Make `replica` the step's owner, or return the result the step already has.

        `digest` names the input; raises StepInputChangedError if the step id came with another.
        """
        row = {
            "step_id": step.step_id,
            "job_id": step.job_id,
            "model": step.model,
            "digest": digest,
            "replica": replica,
            "task_token": task_token,
        }
        if await self._database.fetch(_CLAIM_FIRST, row):
            return Claimed(1, 0, Usage())
        return await self._database.transact(lambda connection: _claim_again(connection, row))

    async def attach(self, step_id: str, epoch: int, task_token: bytes) -> None:
        """Record that a later attempt joined the running generation."""
        values = {"at_step": step_id, "at_epoch": epoch, "new_token": task_token}
        await self._database.execute(_ATTACH, values)

    async def progress(self, step_id: str, epoch: int, usage: Usage) -> None:
        """Record this attempt's tokens so far: what stands if the process is killed."""
        values = {"at_step": step_id, "at_epoch": epoch, **_usage_values(usage)}
        await self._database.execute(_PROGRESS, values)

    async def commit(
        self,
        result: LLMStepResult,
        *,
        parent: str | None,
        append: Sequence[Message],
        run: TokenRun,
    ) -> bool:
        """Accept a finished result, with its messages and tokens; False if the epoch is stale.

        `append` is every message after `parent`, the assistant's last. `result.usage` is over all
        attempts: what claim told as past, plus this one's. If stale, nothing is written but this
        attempt's tokens, as waste of its own row. Committing twice is committing once.
        """
        nodes = chain(parent, append)
        assert result.outcome is Outcome.FINISHED
        assert result.context is not None
        assert result.context.head == nodes[-1].hash, "the context must end in the last message"
        assert run.step_id == result.step_id
        values = {
            "at_step": result.step_id,
            "at_epoch": result.epoch,
            "result_json": result.model_dump_json(),
            "new_head": result.context.head,
            **_usage_values(result.usage),
            **node_values(nodes),
            "run_parent": run.parent,
            "tokenizer": run.tokenizer,
            "token_ids": pack_token_ids(run.token_ids),
        }
        rows = await self._database.fetch(_COMMIT, values)
        return bool(rows[0].won) or await self._is_committed(result)

    async def _is_committed(self, result: LLMStepResult) -> bool:
        """Say whether this very epoch is the finished one; if superseded, count its waste."""
        at_row = {"at_step": result.step_id, "at_epoch": result.epoch}
        rows = await self._database.fetch(_READ_ROW, at_row)
        if not rows or rows[0].outcome != _ABANDONED:
            return bool(rows) and rows[0].outcome == _FINISHED
        past = {name: getattr(rows[0], column) for name, column in _PAST_COLUMNS.items()}
        own = {name: max(getattr(result.usage, name) - past[name], 0) for name in _COUNTS}
        await self.close_attempt(
            result.step_id,
            result.epoch,
            AttemptOutcome.ABANDONED,
            Usage(**own),
            "result came too late",
        )
        return False

    async def close_attempt(
        self,
        step_id: str,
        epoch: int,
        outcome: AttemptOutcome,
        usage: Usage | None,
        error: str = "",
    ) -> None:
        """End an attempt without a result; `usage` is its own tokens, None keeps those on record.

        A superseded attempt stays ABANDONED and gets its final count; an ended one is left alone.
        """
        assert outcome not in (AttemptOutcome.RUNNING, AttemptOutcome.FINISHED)
        values = {
            "at_step": step_id,
            "at_epoch": epoch,
            "closed_as": outcome.value,
            "why": storable(error, MAX_ERROR_CHARS),
            **_usage_values(usage),
        }
        await self._database.execute(_CLOSE, values)

    async def abandon_orphans(self, replica: str) -> list[Orphan]:
        """Abandon and return the RUNNING attempts of a replica: all lost, if it just started."""
        rows = await self._database.fetch(_ABANDON_ORPHANS, {"of_replica": replica})
        return [Orphan(row.step_id, row.epoch, row.task_token) for row in rows]

    async def attempts(self, step_id: str) -> list[Attempt]:
        """Return all attempts of a step, first to last."""
        rows = await self._database.fetch(_READ_STEP, {"at_step": step_id})
        return [_attempt(row) for row in rows]


async def _claim_again(
    connection: AsyncConnection, row: dict[str, Any]
) -> Claimed | AlreadyFinished:
    """Claim a step that has attempts already, in the transaction of `connection`."""
    of_step = {"at_step": row["step_id"]}
    digest = (await connection.execute(_LOCK_STEP, of_step)).scalar_one()
    if digest != row["digest"]:
        raise StepInputChangedError(
            f"LLM step {row['step_id']!r} was asked before with another input",
            hint="a step id names one input for ever; reset or fork the job to get a new branch",
        )
    earlier = (await connection.execute(_READ_STEP.with_for_update(), of_step)).all()
    last = earlier[-1]
    for attempt in earlier:
        if attempt.outcome == _FINISHED:
            return AlreadyFinished(LLMStepResult.model_validate_json(attempt.result))
    failures = sum(attempt.outcome == AttemptOutcome.FAILED for attempt in earlier)
    if (last.outcome, last.replica, last.task_token) == (
        _RUNNING,
        row["replica"],
        row["task_token"],
    ):
        return Claimed(last.epoch, failures, _past_as_told(last, earlier[:-1]))
    await connection.execute(_ABANDON, of_step)
    past = _past(earlier)
    await connection.execute(
        _CLAIM_NEXT,
        {
            **row,
            "epoch": last.epoch + 1,
            "past_prompt_tokens": past.prompt_tokens,
            "past_cached_tokens": past.cached_tokens,
            "past_completion_tokens": past.completion_tokens,
        },
    )
    return Claimed(last.epoch + 1, failures, past)


def _past(earlier: Sequence[sa.Row[Any]]) -> Usage:
    past = Usage()
    for attempt in earlier:
        past += Usage(
            prompt_tokens=attempt.prompt_tokens,
            cached_tokens=attempt.cached_tokens,
            completion_tokens=attempt.completion_tokens,
            wasted_tokens=attempt.completion_tokens,
            lower_bound=attempt.lower_bound or attempt.outcome == _RUNNING,
        )
    return past


def _past_as_told(row: sa.Row[Any], earlier: Sequence[sa.Row[Any]]) -> Usage:
    """Return what the claim that made `row` told: late reports of older attempts came since."""
    counts = {name: getattr(row, column) for name, column in _PAST_COLUMNS.items()}
    return Usage(**counts, lower_bound=_past(earlier).lower_bound)


def _attempt(row: sa.Row[Any]) -> Attempt:
    is_waste = row.outcome not in (_RUNNING, _FINISHED)
    usage = Usage(
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        completion_tokens=row.completion_tokens,
        wasted_tokens=row.completion_tokens if is_waste else row.wasted_tokens,
        lower_bound=row.lower_bound,
    )
    return Attempt(
        step_id=row.step_id,
        epoch=row.epoch,
        outcome=AttemptOutcome(row.outcome),
        replica=row.replica,
        usage=usage,
        error=row.error,
        claimed_at=row.claimed_at,
        ended_at=row.ended_at,
    )
