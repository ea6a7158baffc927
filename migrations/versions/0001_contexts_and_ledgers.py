"""Contexts, blobs, token runs, the ledgers of LLM steps and tool calls."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import BYTEA, TIMESTAMP

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

OUTCOME_CHECK = (
    "outcome IN ('running', 'finished', 'cancelled', 'failed', 'abandoned', 'handed_back')"
)


def upgrade() -> None:
    """Apply."""
    _create_contents()
    _create_step_ledger()
    _create_tool_ledger()


def downgrade() -> None:
    """Take back."""
    for table in ("tool_ledger", "step_ledger", "token_runs", "blobs", "contexts"):
        op.drop_table(table)


def _key(name: str, *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text(collation="C"), nullable=nullable)


def _now(name: str) -> sa.Column[object]:
    return sa.Column(
        name, TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False
    )


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), server_default="0", nullable=False)


def _create_contents() -> None:
    op.create_table(
        "contexts",
        _key("hash"),
        _key("parent", nullable=True),
        sa.Column("body", sa.Text(), nullable=False),
        _now("created_at"),
        sa.PrimaryKeyConstraint("hash", name=op.f("contexts_pkey")),
        comment="One message after the conversation that ends in `parent`",
    )
    op.create_table(
        "blobs",
        _key("digest"),
        sa.Column("body", sa.Text(), nullable=False),
        _now("created_at"),
        sa.PrimaryKeyConstraint("digest", name=op.f("blobs_pkey")),
        comment="JSON values named by their content hash",
    )
    op.create_table(
        "token_runs",
        _key("step_id"),
        _key("parent", nullable=True),
        sa.Column("tokenizer", sa.Text(), nullable=False),
        sa.Column("token_ids", BYTEA(), nullable=False),
        _now("created_at"),
        sa.PrimaryKeyConstraint("step_id", name=op.f("token_runs_pkey")),
        comment="Token ids (little-endian int32) that an LLM step added to its parent's run",
    )


def _create_step_ledger() -> None:
    op.create_table(
        "step_ledger",
        _key("step_id"),
        sa.Column("epoch", sa.Integer(), autoincrement=False, nullable=False),
        _key("job_id"),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("replica", sa.Text(), nullable=False),
        sa.Column("task_token", BYTEA(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        _count("prompt_tokens"),
        _count("cached_tokens"),
        _count("completion_tokens"),
        sa.Column("lower_bound", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        _count("past_prompt_tokens"),
        _count("past_cached_tokens"),
        _count("past_completion_tokens"),
        sa.Column("error", sa.Text(), server_default="", nullable=False),
        sa.Column("result", sa.Text(), nullable=True),
        _now("claimed_at"),
        sa.Column("ended_at", TIMESTAMP(timezone=True), nullable=True),
        sa.CheckConstraint(OUTCOME_CHECK, name=op.f("step_ledger_outcome_check")),
        sa.PrimaryKeyConstraint("step_id", "epoch", name=op.f("step_ledger_pkey")),
        comment="One row per attempt (epoch) at an LLM step; its own tokens",
    )
    op.create_index(
        "step_ledger_one_finished_idx",
        "step_ledger",
        ["step_id"],
        unique=True,
        postgresql_where=sa.text("outcome = 'finished'"),
    )
    op.create_index(
        "step_ledger_running_idx",
        "step_ledger",
        ["replica"],
        postgresql_where=sa.text("outcome = 'running'"),
    )


def _create_tool_ledger() -> None:
    op.create_table(
        "tool_ledger",
        _key("call_id"),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        _key("job_id"),
        sa.Column("tool", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("claim_token", BYTEA(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), server_default="", nullable=False),
        sa.Column("result", sa.Text(), nullable=True),
        _now("claimed_at"),
        sa.Column("ended_at", TIMESTAMP(timezone=True), nullable=True),
        sa.CheckConstraint(OUTCOME_CHECK, name=op.f("tool_ledger_outcome_check")),
        sa.PrimaryKeyConstraint("call_id", "attempt", name=op.f("tool_ledger_pkey")),
        comment="One row per attempt at a tool call",
    )
    op.create_index(
        "tool_ledger_one_finished_idx",
        "tool_ledger",
        ["call_id"],
        unique=True,
        postgresql_where=sa.text("outcome = 'finished'"),
    )
