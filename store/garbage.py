"""Collect content that no kept job can reach: conversations, blobs, token runs, results.

Theory of operation. A job is kept if its id is in the set that the caller hands in. Reachable is
what these lead to, following each row's parent:

- the head and the token run of every finished step of a kept job;
- what a kept job was opened with (`job_content`), and its tool results (`tool_ledger.blob`);
- the blobs that reachable messages refer to;
- whatever is younger than the grace time: its job may not be listed, or not have its rows, yet.

The rest is garbage if it is older than the grace time. So are the results that the ledgers keep of
jobs that are not kept: nobody asks for them again. Their rows stay, since they are what was paid.

Marking is one transaction; deleting goes in
batches of their own, so that nobody waits for long. In between, a new job may begin to use old
content. Who writes content that is there already makes it young again (`context`), and each DELETE
asks for its age once more, in the statement that locks the row: so it is either seen young and
stays, or it is gone before it is written anew. For that the grace must be longer than
`MIN_GRACE`: content up to `STALE_AFTER` old is not made young again, and must outlive a collection
that was marked before its new use.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncConnection

from contracts.error import BadInputError
from store.context import STALE_AFTER
from store.database import Database
from store.schema import blobs, contexts, metadata, token_runs

MIN_GRACE = 2 * STALE_AFTER
"""Twice the age up to which content is not made young again: a collection may take as long."""

BATCH_ROWS = 500
"""Rows deleted in one transaction."""

MAX_ROWS = 1_000_000
"""Rows of one table that one collection deletes; the next one goes on."""


@dataclass(frozen=True, slots=True)
class Garbage:
    """Rows of one table and the bytes of what they hold, before compression.

    Of a ledger, rows that lose their result.
    """

    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _Content:
    """A table of content: its key, and the column that is its weight."""

    table: sa.Table
    body: str

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def key(self) -> sa.Column[str]:
        (key,) = self.table.primary_key.columns
        return key

    @property
    def size(self) -> sa.ColumnElement[int]:
        return sa.func.octet_length(self.table.c[self.body])


_CONTENTS = (
    _Content(contexts, "body"),
    _Content(blobs, "body"),
    _Content(token_runs, "token_ids"),
)

_LEDGERS = tuple(metadata.tables[name] for name in ("step_ledger", "tool_ledger"))

_temporary = sa.MetaData()


def _names(table: str) -> sa.Table:
    """Return a temporary table of names, gone at the end of its transaction."""
    return sa.Table(
        table,
        _temporary,
        sa.Column("name", sa.Text(collation="C"), primary_key=True),
        prefixes=["TEMPORARY"],
        postgresql_on_commit="DROP",
    )


_KEPT = _names("kept_jobs")
_LIVE = {content.name: _names(f"live_{content.name}") for content in _CONTENTS}

_job_content, (_steps, _calls) = metadata.tables["job_content"], _LEDGERS
_cutoff = sa.bindparam("cutoff", type_=sa.DateTime(timezone=True))


def _of_kept(column: sa.ColumnElement[str]) -> sa.ColumnElement[bool]:
    return column.in_(sa.select(_KEPT.c.name))


def _held(kind: str) -> sa.Select[str]:
    """Return what kept jobs were opened with, of one kind."""
    of_kind = _job_content.c.kind == kind
    return sa.select(_job_content.c.name).where(of_kind & _of_kept(_job_content.c.job_id))


def _finished(column: sa.Column[str]) -> sa.Select[str]:
    """Return a column of the finished steps of kept jobs."""
    is_finished = _steps.c.outcome == "finished"
    return sa.select(column).where(is_finished & _of_kept(_steps.c.job_id) & column.is_not(None))


def _young(table: sa.Table) -> sa.Select[str]:
    key: sa.Column[str]
    (key,) = table.primary_key.columns
    return sa.select(key).where(table.c.created_at >= _cutoff)


def _mark_chains(table: sa.Table, *roots: sa.Select[str]) -> sa.Executable:
    """Return the INSERT of the names of roots, young rows and all their ancestors."""
    (key,) = table.primary_key.columns
    start = sa.union(*roots, _young(table)).subquery()
    live = sa.select(start.c[0].label("name")).cte("live", recursive=True)
    parents = sa.select(table.c.parent).join(live, key == live.c.name)
    live = live.union(parents.where(table.c.parent.is_not(None)))
    return sa.insert(_LIVE[table.name]).from_select(["name"], sa.select(live.c.name))


def _mark_blobs() -> sa.Executable:
    live = _LIVE["contexts"].c.name
    told = sa.select(contexts.c.blob).join(_LIVE["contexts"], contexts.c.hash == live)
    results = sa.select(_calls.c.blob).where(_of_kept(_calls.c.job_id))
    names = sa.union(
        _held("blob"),
        told.where(contexts.c.blob.is_not(None)),
        results.where(_calls.c.blob.is_not(None)),
    )
    return sa.insert(_LIVE["blobs"]).from_select(["name"], names)


_MARKS = (
    _mark_chains(contexts, _finished(_steps.c.head), _held("context")),
    _mark_chains(token_runs, _finished(_steps.c.step_id)),
    _mark_blobs(),
)
_KEEP = sa.insert(_KEPT).from_select(
    ["name"], sa.select(sa.func.unnest(sa.bindparam("job_ids", type_=ARRAY(sa.Text))))
)


def _is_dead(content: _Content) -> sa.ColumnElement[bool]:
    live = _LIVE[content.name].c.name
    return (content.table.c.created_at < _cutoff) & ~sa.exists().where(live == content.key)


def _count(content: _Content) -> sa.Executable:
    size = sa.func.coalesce(sa.func.sum(content.size), 0)
    return sa.select(sa.func.count(), size).select_from(content.table).where(_is_dead(content))


def _dead_names(content: _Content) -> sa.Executable:
    return sa.select(content.key).where(_is_dead(content)).limit(MAX_ROWS)


def _delete(content: _Content) -> sa.Executable:
    """Return the DELETE of named rows that are still old."""
    names = content.key == sa.any_(sa.bindparam("names", type_=ARRAY(sa.Text)))
    is_old = content.table.c.created_at < _cutoff
    return sa.delete(content.table).where(names & is_old).returning(content.size)


def _is_old_result(ledger: sa.Table) -> sa.ColumnElement[bool]:
    return ledger.c.result.is_not(None) & (ledger.c.ended_at < _cutoff)


def _is_dead_result(ledger: sa.Table) -> sa.ColumnElement[bool]:
    is_kept = sa.exists().where(_KEPT.c.name == ledger.c.job_id)
    return _is_old_result(ledger) & ~is_kept


def _count_results(ledger: sa.Table) -> sa.Executable:
    size = sa.func.coalesce(sa.func.sum(sa.func.octet_length(ledger.c.result)), 0)
    counted = sa.select(sa.func.count(), size).select_from(ledger)
    return counted.where(_is_dead_result(ledger))


def _name(ledger: sa.Table) -> sa.Column[str]:
    """Return the column that names a step or a call; each has one result at most."""
    name: sa.Column[str]
    name, *_ = ledger.primary_key.columns
    return name


def _dead_results(ledger: sa.Table) -> sa.Executable:
    return sa.select(_name(ledger)).where(_is_dead_result(ledger)).limit(MAX_ROWS)


def _drop_results(ledger: sa.Table) -> sa.Executable:
    """Return the UPDATE that takes the results out of named rows."""
    names = _name(ledger) == sa.any_(sa.bindparam("names", type_=ARRAY(sa.Text)))
    size = sa.func.octet_length(ledger.c.result).label("size")
    held = sa.select(*ledger.primary_key.columns, size).where(names & _is_old_result(ledger))
    old = held.with_for_update().cte("old")
    same = sa.and_(*(column == old.c[column.name] for column in ledger.primary_key.columns))
    return sa.update(ledger).where(same).values(result=None).returning(old.c.size)


_DELETES = {content.name: _delete(content) for content in _CONTENTS} | {
    ledger.name: _drop_results(ledger) for ledger in _LEDGERS
}
_COUNTS = {content.name: _count(content) for content in _CONTENTS} | {
    ledger.name: _count_results(ledger) for ledger in _LEDGERS
}
_DEAD = {content.name: _dead_names(content) for content in _CONTENTS} | {
    ledger.name: _dead_results(ledger) for ledger in _LEDGERS
}


@dataclass(frozen=True, slots=True)
class _Marked:
    """What was garbage at one moment: counts by table, and names if they are to be deleted."""

    cutoff: datetime
    counts: dict[str, Garbage]
    names: dict[str, list[str]]


async def collect(
    database: Database, kept: Collection[str], *, grace: timedelta, delete: bool = False
) -> dict[str, Garbage]:
    """Return what is garbage, by table; with `delete`, what was deleted, at most `MAX_ROWS` each.

    `kept` holds the ids of all jobs that are live or kept. It must have been asked for before this
    is called. Raises BadInputError for a `grace` below `MIN_GRACE`.
    """
    if grace < MIN_GRACE:
        raise BadInputError(
            f"a grace time of {grace} is too short, the limit is {MIN_GRACE}",
            hint="content that young may belong to a job that is not on record yet",
        )

    async def mark(connection: AsyncConnection) -> _Marked:
        return await _mark(connection, kept, grace, with_names=delete)

    marked = await database.transact(mark)
    if not delete:
        return marked.counts
    return {
        name: await _deleted(database, delete_rows, marked.names[name], marked.cutoff)
        for name, delete_rows in _DELETES.items()
    }


async def _mark(
    connection: AsyncConnection, kept: Collection[str], grace: timedelta, *, with_names: bool
) -> _Marked:
    """Find the garbage, in the transaction of `connection`."""
    for kept_table in (_KEPT, *_LIVE.values()):
        await connection.run_sync(kept_table.create)
    await connection.execute(_KEEP, {"job_ids": sorted(set(kept))})
    cutoff = (await connection.execute(sa.select(sa.func.now() - grace))).scalar_one()
    for statement in _MARKS:
        await connection.execute(statement, {"cutoff": cutoff})
    counts: dict[str, Garbage] = {}
    names: dict[str, list[str]] = {}
    for name, count in _COUNTS.items():
        rows, size = (await connection.execute(count, {"cutoff": cutoff})).one()
        counts[name] = Garbage(int(rows), int(size))
        if with_names:
            found = await connection.execute(_DEAD[name], {"cutoff": cutoff})
            names[name] = list(found.scalars())
    return _Marked(cutoff, counts, names)


async def _deleted(
    database: Database, statement: sa.Executable, names: list[str], cutoff: datetime
) -> Garbage:
    """Delete the named rows that are still old, or their results; return what is gone."""
    rows, size = 0, 0
    for start in range(0, len(names), BATCH_ROWS):
        batch = {"names": names[start : start + BATCH_ROWS], "cutoff": cutoff}
        gone = await database.fetch(statement, batch)
        rows, size = rows + len(gone), size + sum(row[0] for row in gone)
    return Garbage(rows, size)
