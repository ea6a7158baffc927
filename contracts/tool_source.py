"""Where tools come from that are not Python functions: servers, documents, databases, activities.

A text that may hold a secret names it instead: `${env:NAME}` or `${file:PATH}`. Only the tool
worker puts the value in its place, for the moment of the call.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from pydantic import Field, JsonValue, model_validator

from contracts.message import Frozen

Duration = Annotated[timedelta, Field(gt=timedelta(0), le=timedelta(days=366))]
"""A time Temporal can keep: it refuses zero, negative and very long ones over and over."""


class McpServer(Frozen):
    """An MCP server: a program that speaks over its standard streams, or the URL of a service."""

    command: tuple[str, ...] = Field((), max_length=64)
    """Program and arguments, started by the tool worker."""
    env: dict[str, str] = Field(default_factory=dict)
    """Added to the few variables that the program inherits."""
    url: str | None = None
    """Endpoint of the streamable HTTP transport."""
    headers: dict[str, str] = Field(default_factory=dict)
    list_timeout: Duration = timedelta(seconds=15)
    """How long the server may take to connect and to list its tools, when the job opens."""

    @model_validator(mode="after")
    def _has_one_transport(self) -> McpServer:
        if bool(self.command) == bool(self.url):
            raise ValueError("an MCP server has either a `command` or a `url`")
        if self.env and self.url:
            raise ValueError("`env` is for a `command`; a `url` takes `headers`")
        if self.headers and self.command:
            raise ValueError("`headers` are for a `url`; a `command` takes `env`")
        return self


class OpenApiService(Frozen):
    """An HTTP service that an OpenAPI 3 document describes; each operation is a tool."""

    document: str = Field(min_length=1)
    """URL, or path seen from the tool worker, of the document (JSON or YAML)."""
    url: str | None = None
    """Where the service is, if not where the document says."""
    headers: dict[str, str] = Field(default_factory=dict)
    query: dict[str, str] = Field(default_factory=dict)
    """Query parameters sent with each call, an API key say."""


class SqlDatabase(Frozen):
    """A database that the model asks in SQL, or by one statement with parameters."""

    url: str = Field(min_length=1)
    """As SQLAlchemy reads it; its password should be a reference."""
    description: str = Field(min_length=1, max_length=4_000)
    """What the model is told: what the tables hold."""
    statement: str | None = Field(None, min_length=1, max_length=20_000)
    """With `:name` parameters, which are the tool's arguments; without it the model writes SQL."""
    read_only: bool = True
    max_rows: int = Field(200, ge=1, le=10_000)


class RemoteActivity(Frozen):
    """An activity that somebody else's worker runs, in any language: it takes the arguments object.

    Its activity id is the call's id, which is the idempotency key.
    """

    type: str = Field(min_length=1, max_length=200)
    queue: str = Field(min_length=1, max_length=200)
    description: str = Field(min_length=1, max_length=4_000)
    arguments: dict[str, JsonValue]
    """JSON schema of the arguments object, so its `type` is `object`."""
    heartbeat: Duration | None = None
    """How long it may be silent, if it heartbeats; a worker that was lost is noticed so."""
