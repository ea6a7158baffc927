"""A namespace that no other test uses."""

from __future__ import annotations

import asyncio
from uuid import uuid4

from temporalio.api.workflowservice.v1 import RegisterNamespaceRequest
from temporalio.client import Client

from contracts.error import BadInputError, UnavailableError
from muster.connection import connect_to
from muster.stack.namespace import check_namespace


async def new_namespace(address: str, prefix: str) -> Client:
    """Return a client of a new namespace that nobody has prepared."""
    name = f"{prefix}-{uuid4().hex[:8]}"
    client = await connect_to(address, name, role="test")
    request = RegisterNamespaceRequest(namespace=name)
    request.workflow_execution_retention_period.FromSeconds(86_400)
    await client.workflow_service.register_namespace(request)
    await _until_known(client)
    return client


async def _until_known(client: Client) -> None:
    """Wait until the server's cache has learned of the namespace."""
    async with asyncio.timeout(60):
        while True:
            try:
                await check_namespace(client)
            except UnavailableError:
                await asyncio.sleep(0.1)
            except BadInputError as error:
                if "does not exist" not in error.message:
                    return
                await asyncio.sleep(0.1)
