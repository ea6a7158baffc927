"""The archive of histories, and the projections `jobs` and `turns` that are folded from it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import BYTEA, TIMESTAMP

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens", "wasted_tokens")
_TIMES = (
    "total_s", "orchestration_s", "host_pre_s", "ready_wait_s", "engine_queue_s", "prefill_s",
    "decode_s", "host_post_s", "tool_s", "unfinished_s",
)  # fmt: skip


def upgrade() -> None:
    """Apply."""
    _create_histories()
    _create_jobs()
    _create_turns()


def downgrade() -> None:
    """Take back."""
    for table in ("turns", "jobs", "history_chunks", "histories"):
        op.drop_table(table)


def _key(name: str, *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text(collation="C"), nullable=nullable)


def _at(name: str, *, nullable: bool = False) -> sa.Column[object]:
    return sa.Column(name, TIMESTAMP(timezone=True), nullable=nullable)


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=False)


def _create_histories() -> None:
    op.create_table(
        "histories",
        _key("job_id"),
        _key("run_id"),
        _key("previous_run_id", nullable=True),
        _at("started_at"),
        _at("closed_at"),
        sa.Column("status", sa.Text(), nullable=False),
        _count("events"),
        _count("bytes"),
        sa.Column(
            "archived_at",
            TIMESTAMP(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("job_id", "run_id", name=op.f("histories_pkey")),
        comment="One closed run of a job; its history is in `history_chunks`",
    )
    op.create_table(
        "history_chunks",
        _key("job_id"),
        _key("run_id"),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("body", BYTEA(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id", "run_id"],
            ["histories.job_id", "histories.run_id"],
            name=op.f("history_chunks_run_fkey"),
            ondelete="CASCADE",
            deferrable=True,
            initially="DEFERRED",
        ),
        sa.PrimaryKeyConstraint("job_id", "run_id", "number", name=op.f("history_chunks_pkey")),
        comment="Temporal's History message, gzip, cut into chunks counted from 0",
    )


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        _key("job_id"),
        *(_key(name, nullable=True) for name in ("agent", "tenant", "model")),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("stop_reason", sa.Text(), nullable=True),
        _at("started_at"),
        _at("closed_at", nullable=True),
        *(_count(name) for name in ("runs", "turns", "llm_steps", "tool_calls", *_TOKENS)),
        sa.Column("lower_bound", sa.Boolean(), nullable=False),
        _count("open_attempts"),
        sa.Column("answer", sa.Text(), nullable=True),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("job_id", name=op.f("jobs_pkey")),
        comment="Projection: one row per job that has a closed run",
    )
    op.create_index("jobs_started_at_idx", "jobs", ["started_at"])
    op.create_index("jobs_tenant_idx", "jobs", ["tenant", "started_at"])
    op.create_index("jobs_agent_idx", "jobs", ["agent", "started_at"])
    op.create_index(
        "jobs_open_attempts_idx",
        "jobs",
        ["job_id"],
        postgresql_where=sa.text("open_attempts > 0"),
    )


def _create_turns() -> None:
    op.create_table(
        "turns",
        _key("job_id"),
        sa.Column("turn", sa.Integer(), autoincrement=False, nullable=False),
        _key("step_id", nullable=True),
        *(
            sa.Column(name, sa.Text(), nullable=True)
            for name in ("state", "finish_reason", "replica")
        ),
        *(_count(name) for name in ("attempts", "cohort_size", "tool_calls", *_TOKENS)),
        sa.Column("lower_bound", sa.Boolean(), nullable=False),
        *(sa.Column(name, sa.Double(), nullable=False) for name in _TIMES),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.job_id"], name=op.f("turns_job_fkey"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "turn", name=op.f("turns_pkey")),
        comment="Projection: one row per turn; times in seconds",
    )
