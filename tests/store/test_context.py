"""Conversations are stored by content: shared, idempotent, whole or refused."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa

from contracts.error import LimitExceededError
from contracts.llm_step import Usage
from contracts.message import ContextRef, Message, Role, ToolCall, content_hash, node_hash
from store import context
from store.context import ContextStore, NotStoredError, pack_token_ids, unpack_token_ids
from store.database import Database
from store.schema import contexts
from store.step_ledger import Claimed, StepLedger
from tests.store.sample import TOKENIZER, assistant, step_input, step_result, token_run, user

SYSTEM = Message(role=Role.SYSTEM, content="You are terse.")


async def _count(database: Database, table: str) -> int:
    rows = await database.fetch(sa.text(f"SELECT count(*) AS n FROM {table}"))
    return int(rows[0].n)


async def test_conversation_comes_back_as_it_was_put(database: Database) -> None:
    store = ContextStore(database)
    messages = [
        SYSTEM,
        user('NUL \x00, emoji 🙂, quote " and \u2028'),
        Message(
            role=Role.ASSISTANT,
            content="",
            tool_calls=(ToolCall(id="c1", tool="find", arguments={"x": [1, None, 0.5, "\x00"]}),),
        ),
        Message(role=Role.TOOL, content="found", tool_call_id="c1", tool="find"),
    ]
    head = await store.put(None, messages)
    assert await store.load(head) == messages


async def test_head_is_the_chain_of_node_hashes(database: Database) -> None:
    first = node_hash(None, SYSTEM)
    head = await ContextStore(database).put(None, [SYSTEM, user("a")])
    assert head == node_hash(first, user("a"))


async def test_putting_twice_and_at_once_stores_each_node_once(database: Database) -> None:
    store = ContextStore(database)
    heads = await asyncio.gather(*(store.put(None, [SYSTEM, user("a")]) for _ in range(20)))
    assert len(set(heads)) == 1
    assert await _count(database, "contexts") == 2


async def test_conversations_that_open_alike_share_nodes_and_fork_freely(
    database: Database,
) -> None:
    store = ContextStore(database)
    trunk = await store.put(None, [SYSTEM, user("a")])
    left = await store.put(trunk, [assistant("left")])
    right = await store.put(trunk, [assistant("right")])
    assert await _count(database, "contexts") == 4
    assert [m.content for m in await store.load(left)] == ["You are terse.", "a", "left"]
    assert [m.content for m in await store.load(right)] == ["You are terse.", "a", "right"]


async def test_unknown_parent_is_refused_and_nothing_is_written(database: Database) -> None:
    store = ContextStore(database)
    with pytest.raises(NotStoredError, match="'nowhere' is not in the store"):
        await store.put("nowhere", [user("a")])
    assert await _count(database, "contexts") == 0


async def test_unknown_and_broken_conversations_are_refused(database: Database) -> None:
    store = ContextStore(database)
    with pytest.raises(LookupError, match="'nowhere' is not in the store"):
        await store.load("nowhere")
    root = await store.put(None, [SYSTEM])
    head = await store.put(root, [user("a")])
    async with database.engine.begin() as connection:
        await connection.execute(contexts.delete().where(contexts.c.hash == root))
    with pytest.raises(NotStoredError, match="lacks its ancestor"):
        await store.load(head)


async def test_long_conversation_loads_in_order(database: Database) -> None:
    store = ContextStore(database)
    messages = [user(str(number)) for number in range(2_000)]
    assert await store.load(await store.put(None, messages)) == messages


async def test_json_values_are_named_by_their_content(database: Database) -> None:
    store = ContextStore(database)
    digest = await store.put_blob({"b": [1, "\x00"], "a": None})
    assert digest == content_hash({"a": None, "b": [1, "\x00"]})
    assert digest == await store.put_blob({"a": None, "b": [1, "\x00"]})
    assert await store.get_blob(digest) == {"a": None, "b": [1, "\x00"]}
    with pytest.raises(NotStoredError, match="'nowhere'"):
        await store.get_blob("nowhere")


async def test_json_value_over_its_limit_is_refused(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "MAX_BLOB_BYTES", 10)
    with pytest.raises(LimitExceededError, match="has 12 bytes, the limit is 10 bytes"):
        await ContextStore(database).put_blob("x" * 10)


async def _commit_step(
    database: Database,
    step_id: str,
    base: ContextRef | None,
    token_ids: list[int],
    tokenizer: str = TOKENIZER,
) -> ContextRef:
    ledger, step = StepLedger(database), step_input(step_id, base)
    claimed = await ledger.claim(step=step, digest=step_id, replica="r", task_token=b"t")
    assert isinstance(claimed, Claimed)
    result, messages = step_result(step, claimed.epoch, Usage(), answer=step_id)
    parent = base.head if base else None
    run = token_run(step, token_ids, tokenizer)
    assert await ledger.commit(result, parent=parent, append=messages, run=run)
    assert result.context is not None
    return result.context


async def test_token_runs_concatenate_along_their_parents(database: Database) -> None:
    one = await _commit_step(database, "job-1/b/1", None, [1, 2, 3])
    two = await _commit_step(database, "job-1/b/2", one, [])
    three = await _commit_step(database, "job-1/b/3", two, [2**31 - 1, 0])
    store = ContextStore(database)
    assert three.token_run == "job-1/b/3"
    assert await store.load_token_run(three.token_run, TOKENIZER) == [1, 2, 3, 2**31 - 1, 0]


async def test_fork_keeps_its_two_token_runs_apart(database: Database) -> None:
    trunk = await _commit_step(database, "job-1/b/1", None, [1])
    left = await _commit_step(database, "job-1/b/2", trunk, [2])
    right = await _commit_step(database, "job-1/fork/2", trunk, [3])
    store = ContextStore(database)
    assert await store.load_token_run(str(left.token_run), TOKENIZER) == [1, 2]
    assert await store.load_token_run(str(right.token_run), TOKENIZER) == [1, 3]


async def test_run_of_another_tokenizer_anywhere_in_the_chain_is_none(database: Database) -> None:
    one = await _commit_step(database, "job-1/b/1", None, [1], tokenizer="other")
    await _commit_step(database, "job-1/b/2", one, [2])
    store = ContextStore(database)
    assert await store.load_token_run("job-1/b/2", TOKENIZER) is None
    assert await store.load_token_run("job-1/b/1", "other") == [1]
    assert await store.load_token_run("nowhere", TOKENIZER) is None


def test_token_ids_pack_as_little_endian_int32() -> None:
    assert pack_token_ids([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    assert unpack_token_ids(pack_token_ids([0, 7, 2**31 - 1])) == [0, 7, 2**31 - 1]
