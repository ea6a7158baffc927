"""What each job holds, so that the rest can be collected: openings, heads of steps, blobs.

Openings from before are on no record. What may be one is kept for ever: every blob (until now only
toolsets were), and each conversation that ends where no step has ended.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

HEAD_OF_RESULT = r'"context":\{"head":"([0-9a-f]{64})"'
"""In a step's result as JSON text; a string value in it would have its quotes escaped."""


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "job_content",
        _key("job_id", nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        _key("name", nullable=False),
        sa.CheckConstraint("kind IN ('context', 'blob')", name=op.f("job_content_kind_check")),
        sa.PrimaryKeyConstraint("job_id", "kind", "name", name=op.f("job_content_pkey")),
        comment="What a job holds from its opening on: its first conversation, its toolset",
    )
    for table, column in (("contexts", "blob"), ("step_ledger", "head"), ("tool_ledger", "blob")):
        op.add_column(table, _key(column))
    op.execute(
        sa.text(
            "UPDATE step_ledger SET head = substring(result FROM :head) WHERE outcome = 'finished'"
        ).bindparams(head=HEAD_OF_RESULT)
    )
    op.execute("UPDATE blobs SET created_at = 'infinity'")
    op.execute(
        "UPDATE contexts SET created_at = 'infinity'"
        " WHERE NOT EXISTS (SELECT FROM step_ledger WHERE head = contexts.hash)"
        " AND NOT EXISTS (SELECT FROM contexts child WHERE child.parent = contexts.hash)"
    )


def downgrade() -> None:
    """Take back."""
    for table in ("contexts", "blobs"):
        op.execute(f"UPDATE {table} SET created_at = now() WHERE created_at = 'infinity'")  # noqa: S608
    for table, column in (("contexts", "blob"), ("step_ledger", "head"), ("tool_ledger", "blob")):
        op.drop_column(table, column)
    op.drop_table("job_content")


def _key(name: str, *, nullable: bool = True) -> sa.Column[str]:
    return sa.Column(name, sa.Text(collation="C"), nullable=nullable)
