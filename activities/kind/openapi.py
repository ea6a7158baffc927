"""HTTP services as tools: the operations that an OpenAPI document describes.

The document is read anew when a job opens; which operations it had is pinned by their names. A call
is one request: it is never sent again here, so that the attempts made are those that Temporal
counts. The call's key goes with it as `Idempotency-Key`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from pydantic import JsonValue

from activities.kind.http import HttpClients, HttpRequest
from activities.kind.json_schema import check_arguments
from activities.kind.openapi_answer import read_answer
from activities.kind.openapi_endpoint import endpoint_of
from activities.kind.openapi_operation import Operation
from activities.kind.openapi_request import Endpoint, build_request
from activities.kind.openapi_source import Source, Sources, in_thread
from activities.secret import Secrets
from activities.tool import LoadedTool, ServedTool
from contracts.agent import ToolRef
from contracts.error import UnavailableError
from contracts.tool_source import OpenApiService

LOAD_TIMEOUT_S = 8.0
"""How long a call waits for the document where it was not read yet; less than what Temporal gives a
call beyond its tool's timeout. Reading goes on, so the next attempt may find it."""


class OpenApiTools:
    """Calls HTTP services; keeps their documents and a few connections."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._clients = HttpClients()
        self._sources = Sources(secrets, self._clients)

    async def describe(self, ref: ToolRef) -> Sequence[ServedTool]:
        """Return the operations that the agent file names, all that can be called if it names none.

        Raises MusterError for a document that cannot be had or is bad, and for missing secrets.
        """
        assert ref.openapi is not None
        source = await self._sources.get(ref, ref.openapi, anew=True)
        named = [ref.remote] if ref.remote is not None else list(ref.tools)

        def chosen() -> list[Operation]:
            return [source.operation(each) for each in named] or source.all_supported()

        operations = await in_thread(chosen, ref.openapi.document)
        for each in operations:
            self._endpoint(ref, source, each)
        if not ref.is_server:
            schema = operations[0].schema.model_copy(update={"name": ref.tool_name})
            return [ServedTool(schema, operations[0].remote)]
        return [ServedTool(each.schema, each.remote) for each in operations]

    async def load(self, ref: ToolRef) -> LoadedTool:
        """Return the operation ready to be called; raises MusterError as `describe` does."""
        assert ref.openapi is not None
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                source, operation = await self._operation(ref, ref.openapi)
        except TimeoutError:
            raise UnavailableError(
                f"openapi {ref.openapi.document!r} is not read within {LOAD_TIMEOUT_S:g} s"
            ) from None
        endpoint = self._endpoint(ref, source, operation)

        def bind(given: Mapping[str, JsonValue], key: str) -> Callable[[], Awaitable[str]]:
            check_arguments(ref.tool_name, operation.arguments, given)
            others = source.document.paths
            request = build_request(ref.tool_name, operation, endpoint, given, key, others)
            return lambda: self._call(ref, request)

        return LoadedTool(ref.tool_name, True, bind)

    async def _operation(self, ref: ToolRef, service: OpenApiService) -> tuple[Source, Operation]:
        assert ref.remote is not None
        remote = ref.remote
        source = await self._sources.get(ref, service, anew=False)
        return source, await in_thread(lambda: source.operation(remote), service.document)

    async def close(self) -> None:
        """Close the connections."""
        await self._sources.close()
        await self._clients.close()

    async def _call(self, ref: ToolRef, request: HttpRequest) -> str:
        async with self._clients.answer(ref.tool_name, request) as response:
            return await read_answer(ref.tool_name, request, response, ref.max_result_bytes)

    def _endpoint(self, ref: ToolRef, source: Source, operation: Operation) -> Endpoint:
        assert ref.openapi is not None
        return endpoint_of(self._secrets, ref, ref.openapi, operation.server, source.document.base)
