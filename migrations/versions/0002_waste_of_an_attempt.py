"""Wasted tokens of an attempt: a kept result may have cost rejected samples."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.add_column(
        "step_ledger",
        sa.Column("wasted_tokens", sa.BigInteger(), server_default="0", nullable=False),
    )


def downgrade() -> None:
    """Take back."""
    op.drop_column("step_ledger", "wasted_tokens")
