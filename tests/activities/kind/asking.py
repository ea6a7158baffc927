"""Asking a database as a tool does, without Temporal."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from activities.kind.sql import SqlTools
from activities.secret import Secrets
from contracts.agent import ToolRef


@pytest.fixture
async def tools() -> AsyncIterator[SqlTools]:
    """Return the kind, closed at last."""
    found = SqlTools(Secrets())
    yield found
    await found.close()


def database(url: str, **given: Any) -> ToolRef:
    """Return a tool of kind `sql`; what is no key of the database's own is policy."""
    own = {key: given.pop(key) for key in ("statement", "read_only", "max_rows") if key in given}
    return ToolRef.model_validate(
        {"name": "ask", "sql": {"url": url, "description": "Fruit and prices.", **own}, **given}
    )


async def ask(tools: SqlTools, ref: ToolRef, key: str = "job-1/b/1/0", **arguments: Any) -> Any:
    """Call the tool with the model's arguments and return what comes back."""
    loaded = await tools.load(ref)
    return await loaded.bind(arguments, key)()
