"""What Muster needs of a Temporal namespace: it exists, keeps histories, knows our attributes."""

from __future__ import annotations

from datetime import timedelta

from google.protobuf.duration_pb2 import Duration
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.namespace.v1 import NamespaceConfig
from temporalio.api.operatorservice.v1 import (
    AddSearchAttributesRequest,
    ListSearchAttributesRequest,
)
from temporalio.api.workflowservice.v1 import (
    DescribeNamespaceRequest,
    UpdateNamespaceRequest,
)
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from contracts.error import BadInputError, UnavailableError
from contracts.name import SEARCH_AGENT, SEARCH_STATE, SEARCH_TENANT, SEARCH_WAITING_FOR

RETENTION = timedelta(days=30)
"""How long the embedded server keeps the histories of closed jobs."""

SEARCH_ATTRIBUTES = {
    SEARCH_AGENT: IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
    SEARCH_TENANT: IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
    SEARCH_STATE: IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
    SEARCH_WAITING_FOR: IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD_LIST,
}


async def check_namespace(client: Client) -> None:
    """Raise BadInputError unless the namespace exists and knows our search attributes.

    A workflow that sets an attribute the namespace does not know retries that for ever, so workers
    check before they take work.
    """
    missing = set(SEARCH_ATTRIBUTES) - set(await _attributes(client))
    if missing:
        raise BadInputError(
            f"Temporal namespace {client.namespace!r} lacks the search attributes "
            f"{', '.join(sorted(missing))}",
            hint="muster up registers them",
        )


async def prepare_namespace(client: Client) -> None:
    """Set the retention of the embedded server's namespace and register our search attributes."""
    retention = Duration()
    retention.FromTimedelta(RETENTION)
    service = client.workflow_service
    found = await service.describe_namespace(DescribeNamespaceRequest(namespace=client.namespace))
    if found.config.workflow_execution_retention_ttl.ToTimedelta() != RETENTION:
        await service.update_namespace(
            UpdateNamespaceRequest(
                namespace=client.namespace,
                config=NamespaceConfig(workflow_execution_retention_ttl=retention),
            )
        )
    await register_search_attributes(client)


async def register_search_attributes(client: Client) -> None:
    """Register those of our search attributes that the namespace lacks.

    Raises BadInputError if one exists with another type, or the server does not let us.
    """
    known = await _attributes(client)
    for name, kind in SEARCH_ATTRIBUTES.items():
        if name in known and known[name] != kind:
            raise BadInputError(
                f"search attribute {name!r} of namespace {client.namespace!r} has type "
                f"{IndexedValueType.Name(known[name])}, Muster needs {IndexedValueType.Name(kind)}",
                hint="use another namespace: MUSTER_TEMPORAL_NAMESPACE",
            )
    missing = {name: kind for name, kind in SEARCH_ATTRIBUTES.items() if name not in known}
    if not missing:
        return
    try:
        await client.operator_service.add_search_attributes(
            AddSearchAttributesRequest(namespace=client.namespace, search_attributes=missing)
        )
    except RPCError as error:
        if error.status is RPCStatusCode.ALREADY_EXISTS:
            return
        raise BadInputError(
            f"cannot register search attributes in namespace {client.namespace!r}: {error.message}",
            hint=f"register {', '.join(missing)} with the server's own tools",
        ) from error


async def _attributes(client: Client) -> dict[str, IndexedValueType.ValueType]:
    try:
        found = await client.operator_service.list_search_attributes(
            ListSearchAttributesRequest(namespace=client.namespace)
        )
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            raise BadInputError(
                f"Temporal namespace {client.namespace!r} does not exist",
                hint="create it, or set MUSTER_TEMPORAL_NAMESPACE",
            ) from error
        raise UnavailableError(
            f"Temporal does not answer for namespace {client.namespace!r}: {error.message}"
        ) from error
    return {**found.custom_attributes, **found.system_attributes}
