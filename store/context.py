"""Conversations by content: message nodes named by hash, token runs, JSON values.

A node's hash covers its parent's, so a head names a whole conversation, two jobs that open alike
share nodes, and a fork costs nothing. Writing what is there already changes nothing, but that what
is older than `STALE_AFTER` counts as written now: it is about to be used again, and must not be
collected as garbage before that use is on record. The old rows are locked before the new ones are
written, so a collection that runs at that moment either sees them young or has gone by.
"""

from __future__ import annotations

import asyncio
import json
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from pydantic import JsonValue
from pydantic_core import to_json
from sqlalchemy.dialects.postgresql import ARRAY, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from contracts.error import BadInputError, LimitExceededError
from contracts.limit import HARD_TOOL_RESULT_BYTES
from contracts.message import BlobRef, Message, content_hash, node_hash
from store.database import Database
from store.schema import blobs, contexts, job_content, step_ledger, token_runs

MAX_BLOB_BYTES = HARD_TOOL_RESULT_BYTES + len('""')
"""One stored JSON value."""

STALE_AFTER = timedelta(hours=1)
"""Content younger than this needs no new date: the least grace of a collection is longer."""

_MAX_INLINE_BYTES = 64_000
"""Stored JSON up to this size is read at once; larger values in a thread, off the event loop."""


class NotStoredError(BadInputError, LookupError):
    """A reference names something the store does not hold."""


@dataclass(frozen=True, slots=True)
class TokenRun:
    """The token ids that step `step_id` added to the run of step `parent`, sampled ids included."""

    step_id: str
    parent: str | None
    tokenizer: str
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class RunAt:
    """A token run, and how many messages the conversation has that it ends."""

    run: str
    length: int


@dataclass(frozen=True, slots=True)
class Node:
    """One message as stored."""

    hash: str
    parent: str | None
    body: str
    blob: str | None


def chain(parent: str | None, messages: Sequence[Message]) -> list[Node]:
    """Return the nodes of `messages` after the conversation that ends in `parent`, in order."""
    nodes: list[Node] = []
    for message in messages:
        name = node_hash(parent, message)
        blob = message.blob.digest if message.blob else None
        nodes.append(Node(name, parent, message.model_dump_json(), blob))
        parent = name
    return nodes


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Return ids as little-endian int32."""
    packed = array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(packed: bytes) -> list[int]:
    """Return the ids that `pack_token_ids` packed."""
    token_ids = array("i")
    token_ids.frombytes(packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids.tolist()


def _node_rows() -> sa.TableValuedAlias:
    text = ARRAY(sa.Text)
    return (
        sa.func.unnest(
            sa.bindparam("hashes", type_=text),
            sa.bindparam("parents", type_=text),
            sa.bindparam("bodies", type_=text),
            sa.bindparam("node_blobs", type_=text),
        )
        .table_valued("hash", "parent", "body", "blob")
        .render_derived()
    )


def _renewed(
    table: sa.Table, names: sa.BindParameter[Any], only_if: sa.ColumnElement[bool]
) -> sa.CTE:
    """Return the UPDATE that makes old rows of these names young again."""
    (key,) = table.primary_key.columns
    is_stale = table.c.created_at < sa.func.now() - STALE_AFTER
    return (
        sa.update(table)
        .where((key == sa.any_(names)) & is_stale & only_if)
        .values(created_at=sa.func.now())
        .returning(key)
        .cte("renewed")
    )


def _is_done(cte: sa.CTE) -> sa.ColumnElement[bool]:
    """Return a condition that always holds, and only once all of `cte` is done."""
    return sa.select(sa.func.count() >= 0).select_from(cte).scalar_subquery()


def insert_nodes(*, only_if: sa.ColumnElement[bool]) -> sa.CTE:
    """Return the INSERT of nodes given as `node_values`, done only if the condition holds."""
    rows = _node_rows()
    names = sa.bindparam("hashes", type_=ARRAY(sa.Text))
    is_wanted = only_if & _is_done(_renewed(contexts, names, only_if))
    return (
        insert(contexts)
        .from_select(
            ["hash", "parent", "body", "blob"],
            sa.select(rows.c.hash, rows.c.parent, rows.c.body, rows.c.blob).where(is_wanted),
        )
        .on_conflict_do_nothing()
        .returning(contexts.c.hash)
        .cte("nodes")
    )


def node_values(nodes: Sequence[Node]) -> dict[str, list[str | None]]:
    """Return the parameters of `insert_nodes`."""
    return {
        "hashes": [node.hash for node in nodes],
        "parents": [node.parent for node in nodes],
        "bodies": [node.body for node in nodes],
        "node_blobs": [node.blob for node in nodes],
    }


def _chain_to_root(table: sa.Table, name: str, *carried: str) -> sa.Select[tuple[object, ...]]:
    """Return the SELECT of a row named `:start` and all its ancestors, root first."""
    key, columns = table.c[name], [table.c[column] for column in (name, "parent", *carried)]
    base = sa.select(*columns, sa.literal(0).label("depth")).where(key == sa.bindparam("start"))
    walk = base.cte("walk", recursive=True)
    walk = walk.union_all(sa.select(*columns, walk.c.depth + 1).join(walk, key == walk.c.parent))
    return sa.select(walk.c[name], walk.c.parent, *(walk.c[column] for column in carried)).order_by(
        walk.c.depth.desc()
    )


_LOAD_NODES = _chain_to_root(contexts, "hash", "body", "blob")
_LOAD_RUNS = _chain_to_root(token_runs, "step_id", "tokenizer", "token_ids")
_LAST_RUN = (
    sa.select(token_runs.c.step_id, step_ledger.c.head)
    .join(step_ledger, step_ledger.c.step_id == token_runs.c.step_id)
    .where(
        step_ledger.c.outcome == "finished",
        # the steps of one job, by the primary key's index: "0" follows "/"
        step_ledger.c.step_id > sa.bindparam("job", type_=sa.Text) + "/",
        step_ledger.c.step_id < sa.bindparam("job", type_=sa.Text) + "0",
        token_runs.c.tokenizer == sa.bindparam("of_tokenizer", type_=sa.Text),
        sa.any_(sa.bindparam("heads", type_=ARRAY(sa.Text))) == step_ledger.c.head,
    )
)
_AFTER = sa.bindparam("after", type_=sa.Text)
_PARENT_IS_STORED = _AFTER.is_(None) | sa.exists().where(contexts.c.hash == _AFTER)
_PUT_NODES = sa.select(_PARENT_IS_STORED.label("parent_is_stored")).add_cte(
    insert_nodes(only_if=_PARENT_IS_STORED)
)


def _insert_blob() -> sa.Executable:
    digest = sa.bindparam("new_digest", type_=sa.Text)
    names = sa.bindparam("new_digests", type_=ARRAY(sa.Text))
    row = sa.select(digest, sa.bindparam("new_body", type_=sa.Text))
    return (
        insert(blobs)
        .from_select(["digest", "body"], row.where(_is_done(_renewed(blobs, names, sa.true()))))
        .on_conflict_do_nothing()
        .returning(blobs.c.digest)
    )


_PUT_BLOB = _insert_blob()
_GET_BLOB = sa.select(blobs.c.body).where(blobs.c.digest == sa.bindparam("digest"))
_HOLD = insert(job_content).on_conflict_do_nothing()


@dataclass(frozen=True, slots=True)
class _Blob:
    """A JSON value as stored."""

    digest: str
    body: str
    bytes: int

    def values(self) -> dict[str, object]:
        """Return the parameters of `_PUT_BLOB`."""
        return {
            "new_digest": self.digest,
            "new_digests": [self.digest],
            "new_body": self.body,
        }


def _blob(value: JsonValue) -> _Blob:
    body = to_json(value)
    if len(body) > MAX_BLOB_BYTES:
        raise LimitExceededError("a stored value", len(body), MAX_BLOB_BYTES, "bytes")
    return _Blob(content_hash(value), body.decode(), len(body))


class ContextStore:
    """Reads and writes conversations, token runs and JSON values; every write is idempotent."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def put(self, parent: str | None, messages: Sequence[Message]) -> str:
        """Store `messages` (one or more) after `parent`; return the new head.

        Raises NotStoredError if `parent` is not stored.
        """
        assert messages, "a conversation grows by at least one message"
        nodes = chain(parent, messages)
        rows = await self._database.fetch(_PUT_NODES, {"after": parent, **node_values(nodes)})
        if not rows[0].parent_is_stored:
            raise NotStoredError(f"conversation {parent!r} is not in the store")
        return nodes[-1].hash

    async def load(self, head: str) -> list[Message]:
        """Return the conversation that ends in `head`, root first; raises NotStoredError."""
        return [Message.model_validate_json(node.body) for node in await self.load_nodes(head)]

    async def load_nodes(self, head: str) -> list[Node]:
        """Return the conversation that ends in `head` as stored; raises NotStoredError."""
        rows = await self._database.fetch(_LOAD_NODES, {"start": head})
        if not rows:
            raise NotStoredError(
                f"conversation {head!r} is not in the store",
                hint="does this process use the same database as the one that opened the job?",
            )
        if rows[0].parent is not None:
            raise NotStoredError(
                f"conversation {head!r} lacks its ancestor {rows[0].parent!r} in the store"
            )
        return [Node(row.hash, row.parent, row.body, row.blob) for row in rows]

    async def last_run(self, job: str, heads: Sequence[str], tokenizer: str) -> RunAt | None:
        """Return the run of `tokenizer`, made by a step of `job`, that ends last among `heads`.

        `heads` names a conversation by the hashes of its messages, root first.
        """
        given = {"job": job, "heads": list(heads), "of_tokenizer": tokenizer}
        rows = await self._database.fetch(_LAST_RUN, given)
        length = {head: number + 1 for number, head in enumerate(heads)}
        found = [RunAt(row.step_id, length[row.head]) for row in rows]
        return max(found, key=lambda run: (run.length, run.run), default=None)

    async def load_token_run(self, run: str, tokenizer: str) -> list[int] | None:
        """Return all ids of the conversation that ends in step `run`, root first.

        None if any part of it is missing or was made with another tokenizer: render it anew then.
        """
        rows = await self._database.fetch(_LOAD_RUNS, {"start": run})
        if not rows or rows[0].parent is not None:
            return None
        if any(row.tokenizer != tokenizer for row in rows):
            return None
        return unpack_token_ids(b"".join(row.token_ids for row in rows))

    async def open(
        self, job_id: str, messages: Sequence[Message], toolset: JsonValue
    ) -> tuple[str, str | None]:
        """Store what job `job_id` begins with, on record as held by it, in one transaction.

        Return the conversation's head, and the name of `toolset` unless that is None. Raises
        LimitExceededError.
        """
        nodes = await asyncio.to_thread(chain, None, messages)
        blob = None if toolset is None else await asyncio.to_thread(_blob, toolset)
        held = [{"job_id": job_id, "kind": "context", "name": nodes[-1].hash}]
        if blob:
            held.append({"job_id": job_id, "kind": "blob", "name": blob.digest})

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(_PUT_NODES, {"after": None, **node_values(nodes)})
            if blob:
                await connection.execute(_PUT_BLOB, blob.values())
            await connection.execute(_HOLD, held)

        await self._database.transact(work)
        return nodes[-1].hash, blob.digest if blob else None

    async def put_blob(self, value: JsonValue) -> str:
        """Store a JSON value; return its content hash. Raises LimitExceededError."""
        blob = await asyncio.to_thread(_blob, value)
        await self._database.fetch(_PUT_BLOB, blob.values())
        return blob.digest

    async def put_text(self, text: str) -> BlobRef:
        """Store a text; return its name, and its size as JSON. Raises LimitExceededError."""
        blob = await asyncio.to_thread(_blob, text)
        await self._database.fetch(_PUT_BLOB, blob.values())
        return BlobRef(digest=blob.digest, bytes=blob.bytes - len('""'))

    async def get_blob(self, digest: str) -> JsonValue:
        """Return the JSON value of that content hash; raises NotStoredError."""
        rows = await self._database.fetch(_GET_BLOB, {"digest": digest})
        if not rows:
            raise NotStoredError(
                f"value {digest!r} is not in the store",
                hint="was its job dropped from Temporal, and its content by `muster gc`?",
            )
        body: str = rows[0].body
        value: JsonValue = (
            json.loads(body)
            if len(body) <= _MAX_INLINE_BYTES
            else await asyncio.to_thread(json.loads, body)
        )
        return value
