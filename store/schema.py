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


def _counts(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.BigInteger, nullable=False) for name in names]


histories = sa.Table(
    "histories",
    metadata,
    sa.Column("job_id", _key_text(), primary_key=True),
    sa.Column("run_id", _key_text(), primary_key=True),
    sa.Column("previous_run_id", _key_text()),
    sa.Column("started_at", TIMESTAMP(timezone=True), nullable=False),
    sa.Column("closed_at", TIMESTAMP(timezone=True), nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    *_counts("events", "bytes"),
    _written_at("archived_at"),
    comment="One closed run of a job; its history is in `history_chunks`",
)

history_chunks = sa.Table(
    "history_chunks",
    metadata,
    sa.Column("job_id", _key_text(), primary_key=True),
    sa.Column("run_id", _key_text(), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("body", BYTEA, nullable=False),
    sa.ForeignKeyConstraint(
        ["job_id", "run_id"],
        ["histories.job_id", "histories.run_id"],
        name="history_chunks_run_fkey",
        ondelete="CASCADE",
        deferrable=True,
        initially="DEFERRED",  # how long a history is, is known after its last chunk
    ),
    comment="Temporal's History message, gzip, cut into chunks counted from 0",
)

TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens", "wasted_tokens")
"""Counts of tokens, as the ledger, the projections and `Usage` name them."""

TIMES = (
    "total_s", "orchestration_s", "host_pre_s", "ready_wait_s", "engine_queue_s", "prefill_s",
    "decode_s", "host_post_s", "tool_s", "unfinished_s",
)  # fmt: skip
"""Where a turn's time went, in seconds."""

LATER_TIMES = ("backlog_s", "sub_agent_s")
"""Parts of `ready_wait_s` and of `tool_s`."""

WALL_TIMES = ("wall_s", "people_s", "other_s")
"""Of a job: its wall time, its waits for people, and what of it no turn has, in seconds."""


def _later(name: str, kind: type[sa.Double[float]] | type[sa.BigInteger]) -> sa.Column[float]:
    """A column that rows of before its migration lack until they are made anew."""
    return sa.Column(name, kind, nullable=False, server_default="0")


jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("job_id", _key_text(), primary_key=True),
    *(sa.Column(name, _key_text()) for name in ("agent", "tenant", "model")),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("stop_reason", sa.Text),
    sa.Column("started_at", TIMESTAMP(timezone=True), nullable=False),
    sa.Column("closed_at", TIMESTAMP(timezone=True)),
    *_counts("runs", "turns", "llm_steps", "tool_calls", *TOKENS),
    sa.Column("lower_bound", sa.Boolean, nullable=False),
    *_counts("open_attempts"),
    sa.Column("answer", sa.Text),
    sa.Column("failure", sa.Text),
    *(_later(name, sa.Double) for name in WALL_TIMES),
    sa.Index("jobs_started_at_idx", "started_at"),
    sa.Index("jobs_closed_at_idx", "closed_at"),
    sa.Index("jobs_tenant_idx", "tenant", "started_at"),
    sa.Index("jobs_agent_idx", "agent", "started_at"),
    sa.Index("jobs_open_attempts_idx", "job_id", postgresql_where=sa.text("open_attempts > 0")),
    comment="Projection: one row per job that has a closed run",
)

turns = sa.Table(
    "turns",
    metadata,
    sa.Column("job_id", _key_text(), primary_key=True),
    sa.Column("turn", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("step_id", _key_text()),
    *(sa.Column(name, sa.Text) for name in ("state", "finish_reason", "replica")),
    *_counts("attempts", "cohort_size", "tool_calls", *TOKENS),
    sa.Column("lower_bound", sa.Boolean, nullable=False),
    *(sa.Column(name, sa.Double, nullable=False) for name in TIMES),
    *(_later(name, sa.Double) for name in LATER_TIMES),
    _later("attainable_tokens", sa.BigInteger),
    sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name="turns_job_fkey", ondelete="CASCADE"),
    comment="Projection: one row per turn; times in seconds",
)

calls = sa.Table(
    "calls",
    metadata,
    sa.Column("job_id", _key_text(), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("turn", sa.Integer, nullable=False),
    *(sa.Column(name, sa.Text, nullable=False) for name in ("call_id", "tool", "state")),
    sa.Column("outcome", sa.Text),
    sa.Column("sub_job", sa.Text),
    sa.Column("is_failed", sa.Boolean, nullable=False),
    *_counts("attempts", *TOKENS),
    sa.Column("total_s", sa.Double, nullable=False),
    sa.Column("duration_s", sa.Double),
    sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name="calls_job_fkey", ondelete="CASCADE"),
    comment="Projection: one row per call of a tool or sub-agent; times in seconds",
)
