"""Conversations by content: message nodes named by hash, token runs, JSON values.

A node's hash covers its parent's, so a head names a whole conversation, two jobs that open alike
share nodes, and a fork costs nothing. Writing what is there already changes nothing.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from pydantic import JsonValue
from pydantic_core import to_json
from sqlalchemy.dialects.postgresql import ARRAY, insert

from contracts.error import BadInputError, LimitExceededError
from contracts.message import Message, content_hash, node_hash
from store.database import Database
from store.schema import blobs, contexts, step_ledger, token_runs

MAX_BLOB_BYTES = 64_000_000
"""One stored JSON value; far above any toolset or tool result."""


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


def chain(parent: str | None, messages: Sequence[Message]) -> list[Node]:
    """Return the nodes of `messages` after the conversation that ends in `parent`, in order."""
    nodes: list[Node] = []
    for message in messages:
        name = node_hash(parent, message)
        nodes.append(Node(name, parent, message.model_dump_json()))
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
        )
        .table_valued("hash", "parent", "body")
        .render_derived()
    )


def insert_nodes(*, only_if: sa.ColumnElement[bool]) -> sa.sql.dml.ReturningInsert[tuple[str]]:
    """Return the INSERT of nodes given as `node_values`, done only if the condition holds."""
    rows = _node_rows()
    return (
        insert(contexts)
        .from_select(
            ["hash", "parent", "body"],
            sa.select(rows.c.hash, rows.c.parent, rows.c.body).where(only_if),
        )
        .on_conflict_do_nothing()
        .returning(contexts.c.hash)
    )


def node_values(nodes: Sequence[Node]) -> dict[str, list[str | None]]:
    """Return the parameters of `insert_nodes`."""
    return {
        "hashes": [node.hash for node in nodes],
        "parents": [node.parent for node in nodes],
        "bodies": [node.body for node in nodes],
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


_LOAD_NODES = _chain_to_root(contexts, "hash", "body")
_LOAD_RUNS = _chain_to_root(token_runs, "step_id", "tokenizer", "token_ids")
_HEAD_OF_RESULT = sa.cast(step_ledger.c.result, sa.JSON)["context"]["head"].as_string()
_LAST_RUN = (
    sa.select(token_runs.c.step_id, _HEAD_OF_RESULT.label("head"))
    .join(step_ledger, step_ledger.c.step_id == token_runs.c.step_id)
    .where(
        step_ledger.c.outcome == "finished",
        # the steps of one job, by the primary key's index: "0" follows "/"
        step_ledger.c.step_id > sa.bindparam("job", type_=sa.Text) + "/",
        step_ledger.c.step_id < sa.bindparam("job", type_=sa.Text) + "0",
        token_runs.c.tokenizer == sa.bindparam("of_tokenizer", type_=sa.Text),
        sa.any_(sa.bindparam("heads", type_=ARRAY(sa.Text))) == _HEAD_OF_RESULT,
    )
)
_PARENT_IS_STORED = sa.bindparam("parent", type_=sa.Text).is_(None) | sa.exists().where(
    contexts.c.hash == sa.bindparam("parent", type_=sa.Text)
)
_ADDED = insert_nodes(only_if=_PARENT_IS_STORED).cte("added")
_PUT_NODES = sa.select(_PARENT_IS_STORED.label("parent_is_stored")).add_cte(_ADDED)
_PUT_BLOB = insert(blobs).on_conflict_do_nothing().returning(blobs.c.digest)
_GET_BLOB = sa.select(blobs.c.body).where(blobs.c.digest == sa.bindparam("digest"))


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
        rows = await self._database.fetch(_PUT_NODES, {"parent": parent, **node_values(nodes)})
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
        return [Node(row.hash, row.parent, row.body) for row in rows]

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

    async def put_blob(self, value: JsonValue) -> str:
        """Store a JSON value; return its content hash. Raises LimitExceededError."""
        body = to_json(value)
        if len(body) > MAX_BLOB_BYTES:
            raise LimitExceededError("a stored value", len(body), MAX_BLOB_BYTES, "bytes")
        digest = content_hash(value)
        await self._database.fetch(_PUT_BLOB, {"digest": digest, "body": body.decode()})
        return digest

    async def get_blob(self, digest: str) -> JsonValue:
        """Return the JSON value of that content hash; raises NotStoredError."""
        rows = await self._database.fetch(_GET_BLOB, {"digest": digest})
        if not rows:
            raise NotStoredError(f"value {digest!r} is not in the store")
        value: JsonValue = json.loads(rows[0].body)
        return value
