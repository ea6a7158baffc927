"""Calling the operations of a service as a tool does, without Temporal."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from activities.kind.openapi import OpenApiTools
from activities.secret import Secrets
from contracts.agent import ToolRef
from tests.activities.kind.service import Service

SOURCE = ("document", "url", "headers", "query")


@pytest_asyncio.fixture
async def tools() -> AsyncIterator[OpenApiTools]:
    """Return the kind, closed at last."""
    found = OpenApiTools(Secrets())
    yield found
    await found.close()


def shop(service: Service, **given: Any) -> ToolRef:
    """Return the tools of a service; what is no key of the service's own is policy."""
    own = {key: given.pop(key) for key in SOURCE if key in given}
    document = f"{service.url}/openapi.json"
    return ToolRef.model_validate({"openapi": {"document": document, **own}, **given})


async def ask(tools: OpenApiTools, ref: ToolRef, key: str = "job-1/b/1/0", **arguments: Any) -> Any:
    """Call the one tool that `ref` is and return what the model reads."""
    loaded = await tools.load(ref)
    return await loaded.bind(arguments, key)()
