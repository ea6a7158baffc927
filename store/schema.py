"""The tables. Migrations must make exactly these; a test compares the two.

JSON is kept as text, not `jsonb`: what a tool or a model wrote may hold escaped NUL characters,
which `jsonb` refuses, and nothing here is searched by its inside.

`created_at` of content is when it was last written: who writes what is there already, and old,
makes it young again, so that it is not collected before its new use is on record (`garbage`).
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import BYTEA, TIMESTAMP

metadata = sa.MetaData(
    naming_convention={
        "pk": "%(table_name)s_pkey",
        "ix": "%(table_name)s_%(column_0_N_name)s_idx",
        "uq": "%(table_name)s_%(column_0_N_name)s_key",
        "ck": "%(table_name)s_%(constraint_name)s_check",
    }
)

OUTCOMES = ("running", "finished", "cancelled", "failed", "abandoned", "handed_back")
"""Values of `outcome` in both ledgers; `AttemptOutcome` in words."""

CONTENT_KINDS = ("context", "blob")
"""Values of `job_content.kind`: the table that `name` is a key of."""


def _key_text() -> sa.Text:
    """Text compared byte by byte: cheaper, and a prefix (all steps of one job) uses the index."""
    return sa.Text(collation="C")


def _written_at(name: str) -> sa.Column[object]:
    return sa.Column(
        name, TIMESTAMP(timezone=True), nullable=False, server_default=sa.text("now()")
    )


def _one_of(column: str, values: tuple[str, ...]) -> sa.CheckConstraint:
    listed = ", ".join(f"'{value}'" for value in values)
    return sa.CheckConstraint(f"{column} IN ({listed})", name=column)


contexts = sa.Table(
    "contexts",
    metadata,
    sa.Column("hash", _key_text(), primary_key=True),
    sa.Column("parent", _key_text()),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("blob", _key_text()),
    _written_at("created_at"),
    comment="One message after the conversation that ends in `parent`",
)

blobs = sa.Table(
    "blobs",
    metadata,
    sa.Column("digest", _key_text(), primary_key=True),
    sa.Column("body", sa.Text, nullable=False),
    _written_at("created_at"),
    comment="JSON values named by their content hash",
)

job_content = sa.Table(
    "job_content",
    metadata,
    sa.Column("job_id", _key_text(), primary_key=True),
    sa.Column("kind", sa.Text, primary_key=True),
    sa.Column("name", _key_text(), primary_key=True),
    _one_of("kind", CONTENT_KINDS),
    comment="What a job holds from its opening on: its first conversation, its toolset",
)

token_runs = sa.Table(
    "token_runs",
    metadata,
    sa.Column("step_id", _key_text(), primary_key=True),
    sa.Column("parent", _key_text()),
    sa.Column("tokenizer", sa.Text, nullable=False),
    sa.Column("token_ids", BYTEA, nullable=False),
    _written_at("created_at"),
    comment="Token ids (little-endian int32) that an LLM step added to its parent's run",
)

step_ledger = sa.Table(
    "step_ledger",
    metadata,
    sa.Column("step_id", _key_text(), primary_key=True),
    sa.Column("epoch", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("job_id", _key_text(), nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("replica", sa.Text, nullable=False),
    sa.Column("task_token", BYTEA, nullable=False),
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("wasted_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("lower_bound", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("past_prompt_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("past_cached_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("past_completion_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("error", sa.Text, nullable=False, server_default=""),
    sa.Column("result", sa.Text),
    sa.Column("head", _key_text()),
    _written_at("claimed_at"),
    sa.Column("ended_at", TIMESTAMP(timezone=True)),
    _one_of("outcome", OUTCOMES),
    sa.Index(
        "step_ledger_one_finished_idx",
        "step_id",
        unique=True,
        postgresql_where=sa.text("outcome = 'finished'"),
    ),
    sa.Index(
        "step_ledger_running_idx",
        "replica",
        postgresql_where=sa.text("outcome = 'running'"),
    ),
    comment="One row per attempt (epoch) at an LLM step; its own tokens",
)

tool_ledger = sa.Table(
    "tool_ledger",
    metadata,
    sa.Column("call_id", _key_text(), primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("job_id", _key_text(), nullable=False),
    sa.Column("tool", sa.Text, nullable=False),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("claim_token", BYTEA, nullable=False),
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("error", sa.Text, nullable=False, server_default=""),
    sa.Column("result", sa.Text),
    sa.Column("blob", _key_text()),
    _written_at("claimed_at"),
    sa.Column("ended_at", TIMESTAMP(timezone=True)),
    _one_of("outcome", OUTCOMES),
    sa.Index(
        "tool_ledger_one_finished_idx",
        "call_id",
        unique=True,
        postgresql_where=sa.text("outcome = 'finished'"),
    ),
    comment="One row per attempt at a tool call",
)
