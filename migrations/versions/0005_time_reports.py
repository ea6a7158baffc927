"""What reports over many jobs need: the calls of tools, and the parts of a job's wall time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens", "wasted_tokens")
_OF_JOBS = ("wall_s", "people_s", "other_s")
_OF_TURNS = ("backlog_s", "sub_agent_s")


def upgrade() -> None:
    """Apply. Rows of before have zeros until they are made anew (`muster rebuild`)."""
    for name in _OF_JOBS:
        op.add_column("jobs", _later(name, sa.Double()))
    op.create_index("jobs_closed_at_idx", "jobs", ["closed_at"])
    for name in _OF_TURNS:
        op.add_column("turns", _later(name, sa.Double()))
    op.add_column("turns", _later("attainable_tokens", sa.BigInteger()))
    _create_calls()


def downgrade() -> None:
    """Take back."""
    op.drop_table("calls")
    for name in (*_OF_TURNS, "attainable_tokens"):
        op.drop_column("turns", name)
    op.drop_index("jobs_closed_at_idx", "jobs")
    for name in _OF_JOBS:
        op.drop_column("jobs", name)


def _later(name: str, kind: sa.Double[float] | sa.BigInteger) -> sa.Column[float]:
    return sa.Column(name, kind, nullable=False, server_default="0")


def _create_calls() -> None:
    op.create_table(
        "calls",
        sa.Column("job_id", sa.Text(collation="C"), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("turn", sa.Integer(), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("call_id", "tool", "state")),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("sub_job", sa.Text(), nullable=True),
        sa.Column("is_failed", sa.Boolean(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in ("attempts", *_TOKENS)),
        sa.Column("total_s", sa.Double(), nullable=False),
        sa.Column("duration_s", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.job_id"], name=op.f("calls_job_fkey"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "number", name=op.f("calls_pkey")),
        comment="Projection: one row per call of a tool or sub-agent; times in seconds",
    )
