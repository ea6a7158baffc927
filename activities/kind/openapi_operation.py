"""One operation of an OpenAPI document as a tool: its name, its arguments, where each of them goes.

The model is shown one flat object. Parameters come first, under their own names; of two with one
name the later has its place before it (`query_id`). The properties of an object that is the body
follow; where that would hide something, or the body is no plain object, it is one argument `body`.
What the agent file gives itself (a header, a query parameter) is not shown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from activities.kind.json_schema import check_schema
from activities.kind.openapi_document import METHODS, Document
from activities.kind.openapi_schema import Schemas
from activities.kind.told_schema import told_schema
from contracts.agent import NAME_PATTERN, ToolSchema
from contracts.error import BadInputError

MAX_DESCRIPTION_CHARS = 4_000
"""How much of an operation's description the model is shown."""

MAX_REMOTE_CHARS = 200
"""A longer `operationId` is not used; an agent file could not name it."""

MAX_NAME_CHARS = 64

BODY = "body"

IDEMPOTENCY_KEY = "Idempotency-Key"

PLACES = ("path", "query", "header", "cookie")

TOKEN = re.compile(r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")
"""Name of a header."""

_OURS = frozenset(
    ("accept", "accept-encoding", "authorization", "connection", "content-encoding",
     "content-length", "content-type", "cookie", "expect", "host", "idempotency-key", "keep-alive",
     "te", "trailer", "transfer-encoding", "upgrade")
)  # fmt: skip
"""Headers that a model does not choose, whatever the document says; `cookie` has its own place."""

_FLAT = frozenset(
    ("additionalProperties", "default", "description", "examples", "properties", "required", "type")
)
"""Keywords of an object whose properties may stand among the parameters."""


class UnsupportedError(BadInputError):
    """An operation that we cannot call; it is left out unless the agent file names it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operation stands in its document."""

    method: str
    path: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a request, and the argument that gives it."""

    argument: str
    name: str
    place: str
    style: str
    explode: bool
    is_json: bool


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a request: one argument, or `properties` of it among the arguments."""

    media_type: str
    argument: str | None
    properties: tuple[str, ...]
    required: bool


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation as the model sees it, and how a request is made of the arguments."""

    remote: str
    method: str
    path: str
    server: str | None
    """As the document has it, maybe without a host; None if it names none."""
    schema: ToolSchema
    """What the model is told: of `arguments` what every engine's grammar can keep."""
    arguments: dict[str, JsonValue]
    """What the arguments must be, all of it."""
    parameters: tuple[Parameter, ...]
    body: Body | None


def list_operations(document: Document) -> dict[str, Place]:
    """Return where each operation is, by `operationId`; by method and path if it has none."""
    found: list[tuple[str, Place]] = []
    for path, given in document.paths.items():
        if path.startswith("x-"):
            continue
        item = document.followed(given, f"path {path!r}")
        for method in METHODS:
            if method in item:
                operation = document.followed(item[method], f"{method} of path {path!r}")
                found.append((str(operation.get("operationId") or ""), Place(method, path)))
    count = Counter(name for name, _ in found)
    listed: dict[str, Place] = {}
    for name, place in found:
        is_usable = 0 < len(name) <= MAX_REMOTE_CHARS and count[name] == 1
        by_place = f"{place.method.upper()} {place.path}"[:MAX_REMOTE_CHARS]
        listed[name if is_usable else by_place] = place
    return listed


def build_operation(
    document: Document, remote: str, place: Place, given: tuple[frozenset[str], frozenset[str]]
) -> Operation:
    """Return an operation; `given` are the headers (in lower case) and the query parameters that
    the agent file gives.

    Raises UnsupportedError, or BadInputError for a document that is broken there.
    """
    return _Builder(document, remote, place, given).build()


class _Builder:
    def __init__(
        self,
        document: Document,
        remote: str,
        place: Place,
        given: tuple[frozenset[str], frozenset[str]],
    ) -> None:
        self._document = document
        self._remote = remote
        self._place = place
        self._headers, self._query = given
        self._what = f"operation {remote!r}"
        self._item = document.followed(document.paths[place.path], f"path {place.path!r}")
        self._operation = document.followed(self._item[place.method], self._what)
        self._schemas = Schemas(document)
        self._properties: dict[str, Any] = {}
        self._required: list[str] = []

    def build(self) -> Operation:
        if not self._place.path.startswith("/"):
            raise self._bad(f"its path {self._place.path!r} does not begin with /")
        parameters = [self._parameter(*each) for each in self._listed()]
        body = self._body()
        arguments: dict[str, Any] = {
            "type": "object",
            "properties": self._properties,
            "required": self._required,
            "additionalProperties": False,
        }
        if definitions := self._schemas.definitions():
            arguments["$defs"] = definitions
        self._check(arguments)
        return Operation(
            remote=self._remote,
            method=self._place.method.upper(),
            path=self._place.path,
            server=self._server(),
            schema=ToolSchema(
                name=_fitting(self._operation.get("operationId"), self._place),
                description=self._description(),
                arguments=told_schema(f"{self._remote} of {self._document.shown}", arguments),
            ),
            arguments=arguments,
            parameters=tuple(parameters),
            body=body,
        )

    def _bad(self, problem: str, hint: str = "") -> BadInputError:
        return self._document.bad(f"{self._what}: {problem}", hint)

    def _unsupported(self, problem: str) -> UnsupportedError:
        return UnsupportedError(
            f"openapi {self._document.shown!r}: {self._what}: {problem}",
            hint="choose other operations with `tools: [...]`",
        )

    def _check(self, arguments: dict[str, JsonValue]) -> None:
        try:
            check_schema(self._what, arguments)
        except BadInputError as error:
            problem = error.message.partition("; ")[2] or error.message
            raise self._bad(
                f"its schemas are not JSON schema; {problem}",
                "mend the document, or choose other operations with `tools: [...]`",
            ) from None

    def _listed(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Yield place, name and object of each parameter, once, in the order of their places."""
        found: dict[tuple[str, str], Mapping[str, Any]] = {}
        for holder in (self._item, self._operation):
            listed = holder.get("parameters") or []
            if not isinstance(listed, list):
                raise self._bad("its `parameters` are not a list")
            for each in listed:
                parameter = self._document.followed(each, f"a parameter of {self._what}")
                place, name = str(parameter.get("in")), str(parameter.get("name") or "")
                if place not in PLACES or not name:
                    raise self._unsupported(f"a parameter {name!r} in {place!r}")
                found[place, name] = parameter
        in_path = re.findall(r"\{([^{}]+)\}", self._place.path)
        for name in in_path:
            found.setdefault(("path", name), {"schema": {"type": "string"}})
        for where in PLACES:
            for (place, name), parameter in found.items():
                if place == where and not self._is_hidden(place, name, in_path):
                    yield place, name, parameter

    def _is_hidden(self, place: str, name: str, in_path: Sequence[str]) -> bool:
        match place:
            case "path":
                return name not in in_path
            case "query":
                return name in self._query
            case "header":
                return name.lower() in _OURS | self._headers
            case _:
                return False

    def _parameter(self, place: str, name: str, given: Mapping[str, Any]) -> Parameter:
        if place == "header" and not TOKEN.match(name):
            raise self._bad(f"{name!r} is no name of a header")
        content = given.get("content")
        if content:
            media = self._document.mapping(content, f"`content` of parameter {name!r}")
            kind, inner = next(iter(media.items()))
            if not _is_json(kind):
                raise self._unsupported(f"parameter {name!r} is {kind!r}")
            schema = self._document.mapping(inner or {}, kind).get("schema")
        else:
            schema = given.get("schema")
        default = "form" if place in ("query", "cookie") else "simple"
        style = str(given.get("style") or default)
        explode = given.get("explode")
        argument = self._argument(place, name)
        told = self._schemas.translated({} if schema is None else schema)
        description = given.get("description")
        if isinstance(description, str) and "description" not in told:
            told["description"] = " ".join(description.split())[:MAX_DESCRIPTION_CHARS]
        self._properties[argument] = told
        if place == "path" or given.get("required") is True:
            self._required.append(argument)
        return Parameter(
            argument=argument,
            name=name,
            place=place,
            style=style,
            explode=explode if isinstance(explode, bool) else style == "form",
            is_json=bool(content),
        )

    def _argument(self, place: str, name: str) -> str:
        found = name if name not in self._properties else f"{place}_{name}"
        if found in self._properties:
            raise self._unsupported(f"it has two parameters that would be the argument {found!r}")
        return found

    def _body(self) -> Body | None:
        given = self._operation.get("requestBody")
        if given is None:
            return None
        body = self._document.followed(given, f"the body of {self._what}")
        required = body.get("required") is True
        content = self._document.mapping(body.get("content") or {}, f"`content` of {self._what}")
        chosen = next((each for each in _ranked(content)), None)
        if chosen is None:
            if required:
                kinds = ", ".join(map(str, content)) or "of no media type"
                raise self._unsupported(f"its body is {kinds}; only JSON, forms and text are sent")
            return None
        key, media_type = chosen
        inner = self._document.followed(content[key] or {}, f"{key} of {self._what}")
        schema = self._schemas.translated(inner.get("schema"))
        if media_type == "text/plain":
            schema = {"type": "string"} | schema
        properties = self._flat(schema, media_type, required)
        if properties is not None:
            self._properties |= properties
            self._required += [name for name in schema.get("required", []) if name in properties]
            return Body(media_type, None, tuple(properties), required)
        argument = BODY if BODY not in self._properties else f"request_{BODY}"
        if argument in self._properties:
            raise self._unsupported(f"it has a parameter that is called {argument!r}")
        told = body.get("description")
        if isinstance(told, str) and "description" not in schema:
            schema = schema | {"description": " ".join(told.split())[:MAX_DESCRIPTION_CHARS]}
        self._properties[argument] = schema
        if required:
            self._required.append(argument)
        return Body(media_type, argument, (), required)

    def _flat(
        self, schema: dict[str, Any], media_type: str, required: bool
    ) -> dict[str, Any] | None:
        """Return the properties of a body that may stand among the parameters; None if not."""
        properties = schema.get("properties")
        is_plain = (
            media_type != "text/plain"
            and isinstance(properties, dict)
            and bool(properties)
            and schema.get("type", "object") == "object"
            and set(schema) <= _FLAT
            and isinstance(schema.get("additionalProperties", True), bool)
            and isinstance(schema.get("required", []), list)
        )
        if not is_plain or (schema.get("required") and not required):
            return None
        assert isinstance(properties, dict)
        missing = [name for name in schema.get("required", []) if name not in properties]
        return None if missing or set(properties) & set(self._properties) else properties

    def _server(self) -> str | None:
        for holder in (self._operation, self._item, self._document.tree):
            servers = holder.get("servers")
            if not isinstance(servers, list) or not servers:
                continue
            server = self._document.mapping(servers[0], "a server")
            variables = self._document.mapping(server.get("variables") or {}, "`variables`")
            url = str(server.get("url") or "/")
            for name, variable in variables.items():
                value = self._document.mapping(variable, f"variable {name!r}").get("default", "")
                url = url.replace(f"{{{name}}}", str(value))
            return url
        return None

    def _description(self) -> str:
        parts = [self._operation.get(key) for key in ("summary", "description")]
        words = [" ".join(part.split()) for part in parts if isinstance(part, str)]
        text = ". ".join(dict.fromkeys(word.removesuffix(".") for word in words if word))
        return (text or f"{self._place.method.upper()} {self._place.path}")[:MAX_DESCRIPTION_CHARS]


def reads_as(template: str, path: str) -> bool:
    """Say whether a path, decoded, is one of those that a template stands for."""
    wanted = template.rstrip("/").split("/")
    given = re.sub("/+", "/", path.rstrip("/")).split("/")
    return len(wanted) == len(given) and all(map(_segment_reads_as, wanted, given))


def _segment_reads_as(template: str, segment: str) -> bool:
    first, *others = re.split(r"\{[^{}]*\}", template)
    if not others:
        return segment == first
    if not (segment.startswith(first) and segment.endswith(others[-1])):
        return False
    at = len(first)
    for text in others[:-1]:
        at = segment.find(text, at)
        if at < 0:
            return False
        at += len(text)
    return at + len(others[-1]) <= len(segment)


def _ranked(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the media types that we can send, by the document's name and ours, the best first."""
    kinds = {key: key.partition(";")[0].strip().lower() for key in content}
    for key, kind in kinds.items():
        if _is_json(kind):
            yield key, kind
    for wanted in ("application/x-www-form-urlencoded", "text/plain"):
        yield from ((key, kind) for key, kind in kinds.items() if kind == wanted)
    for wildcard in ("application/*", "*/*"):
        yield from ((key, "application/json") for key, kind in kinds.items() if kind == wildcard)


def _is_json(media_type: str) -> bool:
    kind = media_type.partition(";")[0].strip().lower()
    return kind in ("application/json", "text/json") or kind.endswith("+json")


def _fitting(operation_id: Any, place: Place) -> str:
    """Return a name that a tool may have."""
    text = operation_id if isinstance(operation_id, str) else ""
    if not re.search(r"[A-Za-z]", text):
        text = f"{place.method}{place.path}"
    words = re.sub(r"[^A-Za-z0-9_-]+", "_", text)
    name = re.sub(r"^[^A-Za-z]+", "", words)[:MAX_NAME_CHARS].rstrip("_-")
    return name if re.match(NAME_PATTERN, name) else place.method
