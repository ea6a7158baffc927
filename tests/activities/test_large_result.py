"""A large result goes to the store; history, ledger and model get its name, people a preview."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError
from temporalio.client import Client

from contracts.agent import ToolRef
from contracts.limit import HARD_TOOL_RESULT_BYTES, INLINE_RESULT_BYTES
from contracts.tool import CallToolResult, ToolOutcome
from store.context import ContextStore
from store.database import Database
from tests.activities.conftest import BAD, Caller, request
from tests.activities.one_call import tool_worker
from tests.activities.test_on_temporal import _queue, _workflow


def large(function: str, n: int, **fields: Any) -> Any:
    return request(function, {"n": n}, max_result_bytes=HARD_TOOL_RESULT_BYTES, **fields)


async def _whole(database: Database, result: CallToolResult) -> Any:
    assert result.blob is not None
    return await ContextStore(database).get_blob(result.blob.digest)


@pytest.mark.parametrize("size", [INLINE_RESULT_BYTES, INLINE_RESULT_BYTES + 1])
async def test_a_result_stands_in_history_up_to_its_limit(
    call: Caller, database: Database, size: int
) -> None:
    result = await call(large("returns_large", size))
    assert result.outcome is ToolOutcome.OK
    if size == INLINE_RESULT_BYTES:
        assert (result.content, result.blob) == ("x" * size, None)
        return
    assert result.blob is not None and result.blob.bytes == size
    assert result.content.startswith("x" * 500 + "…\n[the first 500 characters of 16,001 bytes;")
    assert await _whole(database, result) == "x" * size


async def test_size_counts_as_json(call: Caller, database: Database) -> None:
    result = await call(large("quotes", INLINE_RESULT_BYTES - 1))
    assert result.blob is not None and result.blob.bytes == 2 * (INLINE_RESULT_BYTES - 1)
    assert await _whole(database, result) == '"' * (INLINE_RESULT_BYTES - 1)


@pytest.mark.parametrize("n", [4_000_000, 30_000_000])
async def test_a_result_of_many_megabytes_passes_under_a_policy_that_allows_it(
    temporal_client: Client, database: Database, n: int
) -> None:
    queue = _queue()
    async with (
        tool_worker(temporal_client, database, queue),
        _workflow(temporal_client, large("returns_large", n), queue) as handle,
    ):
        result = await handle.result()
    assert len(result.model_dump_json()) < 1_000
    assert await _whole(database, result) == "x" * n


async def test_nested_data_is_measured_as_far_as_its_limit_goes(
    call: Caller, database: Database
) -> None:
    text = await _whole(database, await call(large("returns_many", 1_000_000)))
    assert json.loads(text) == list(range(1_000_000))


async def test_a_call_made_again_is_answered_with_the_same_reference(
    call: Caller, database: Database
) -> None:
    first = await call(large("returns_large", 50_000))
    assert await call(large("returns_large", 50_000)) == first
    other = await call(large("returns_large", 50_000, call_id="job-1/b/2/0"))
    assert other.blob == first.blob, "equal texts are kept once"


def test_no_policy_allows_more_than_one_blob_holds() -> None:
    with pytest.raises(ValidationError, match="less than or equal to 64000000"):
        ToolRef(function=f"{BAD}:returns_large", max_result_bytes=HARD_TOOL_RESULT_BYTES + 1)


async def test_arguments_with_a_huge_name_are_refused_in_few_words(call: Caller) -> None:
    result = await call(request("returns_large", {"n": 1, "k" * 1_000_000: 2}))
    assert result.outcome is ToolOutcome.ERROR
    assert len(result.content) < 5_000
