"""The request that a tool's arguments make: each parameter in its place, encoded so that it stays
there.

A value cannot leave its place: it is percent-encoded in paths and queries, and refused where that
would not hold (line breaks in headers, `..` in paths, a path that reads as another operation's).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote, urlencode

from pydantic import JsonValue

from activities.kind.http import HttpRequest
from activities.kind.openapi_operation import (
    IDEMPOTENCY_KEY,
    Body,
    Operation,
    Parameter,
    reads_as,
)
from activities.tool import WrongArgumentsError

MAX_URL_CHARS = 16_000
"""Servers refuse longer ones."""

MAX_HEADER_CHARS = 8_000
"""One header's value; servers refuse longer ones."""

ACCEPT = "application/json, text/*;q=0.9, */*;q=0.5"

_WITHOUT_KEY = frozenset(("GET", "HEAD"))

_CONTROLS = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the service is, and what the agent file sends it with each call, secrets in place."""

    url: str
    headers: tuple[tuple[str, str], ...]
    query: tuple[tuple[str, str], ...]


def build_request(
    tool: str,
    operation: Operation,
    endpoint: Endpoint,
    given: Mapping[str, JsonValue],
    key: str,
    others: Iterable[str],
) -> HttpRequest:
    """Return the request; `given` fits the operation's schema, `others` are its document's paths.

    Raises WrongArgumentsError for values that cannot go where they should.
    """
    try:
        return _Builder(tool, operation, endpoint, given).build(key, others)
    except UnicodeEncodeError:
        raise WrongArgumentsError(
            f"wrong arguments for tool {tool!r}: a text has characters that UTF-8 does not have"
        ) from None


class _Builder:
    def __init__(
        self,
        tool: str,
        operation: Operation,
        endpoint: Endpoint,
        given: Mapping[str, JsonValue],
    ) -> None:
        self._tool = tool
        self._operation = operation
        self._endpoint = endpoint
        self._given = given

    def build(self, key: str, others: Iterable[str]) -> HttpRequest:
        operation, base = self._operation, self._endpoint.url
        path = self._path(others)
        base, _, base_query = base.partition("?")
        path, _, path_query = path.partition("?")
        queries = [each for each in (base_query, path_query, self._query()) if each]
        url = f"{base.rstrip('/')}{path}{'?' if queries else ''}{'&'.join(queries)}"
        if len(url) > MAX_URL_CHARS:
            raise self._wrong(
                f"they make a URL of {len(url):,} characters, the limit is {MAX_URL_CHARS:,}"
            )
        content, media_type = self._body(operation.body) if operation.body else (None, None)
        headers = dict(self._headers())
        if media_type:
            headers["Content-Type"] = media_type
        configured = {name.lower() for name, _ in self._endpoint.headers}
        kept = [(name, text) for name, text in headers.items() if name.lower() not in configured]
        ours = [("Accept", ACCEPT)] if "accept" not in configured else []
        if operation.method not in _WITHOUT_KEY:
            ours.append((IDEMPOTENCY_KEY, quote(key, safe="!#$&'()*+,/:;=?@[]~")))
        return HttpRequest(
            method=operation.method,
            url=url,
            shown=f"{operation.method} {path[:200]}",
            headers=(*kept, *self._endpoint.headers, *ours),
            content=content,
        )

    def _wrong(self, problem: str) -> WrongArgumentsError:
        return WrongArgumentsError(f"wrong arguments for tool {self._tool!r}: {problem}")

    def _values(self, place: str) -> Iterable[tuple[Parameter, Any]]:
        for each in self._operation.parameters:
            if each.place == place and self._given.get(each.argument) is not None:
                yield each, self._given[each.argument]

    def _path(self, others: Iterable[str]) -> str:
        encoded: dict[str, str] = {}
        for parameter in self._operation.parameters:
            if parameter.place != "path":
                continue
            text = _in_path(parameter, self._given.get(parameter.argument))
            if not text:
                raise self._wrong(f"{parameter.argument}: it must not be empty")
            encoded[parameter.name] = text

        def put(template: str) -> str:
            return re.sub(r"\{([^{}]+)\}", lambda found: encoded.get(found[1], ""), template)

        own = self._operation.path
        path = put(own)
        for segment, template in zip(path.split("/"), own.split("/"), strict=True):
            parts = re.split(r"[/\\]", unquote(segment))
            if segment != template and any(p.partition(";")[0] in (".", "..") for p in parts):
                raise self._wrong(f"`.` and `..` are not values of a path ({own})")
        decoded = unquote(path).replace("\\", "/")
        if decoded.count("/") > own.count("/"):
            other = next((each for each in others if each != own and reads_as(each, decoded)), None)
            if other is not None:
                raise self._wrong(f"with them {own} would be read as {other}")
        return path

    def _query(self) -> str:
        taken = {name for name, _ in self._endpoint.query}
        pairs: list[tuple[str, str]] = []
        for parameter, value in self._values("query"):
            pairs += [each for each in _pairs(parameter, value) if unquote(each[0]) not in taken]
        pairs += [(_quoted(name), _quoted(text)) for name, text in self._endpoint.query]
        return "&".join(f"{name}={text}" for name, text in pairs)

    def _headers(self) -> Iterable[tuple[str, str]]:
        for parameter, value in self._values("header"):
            if parameter.is_json:
                text = _dumped(value)
            else:
                text = ",".join(_items(value, explode=parameter.explode))
            text = text.strip(" \t")
            if _CONTROLS.search(text):
                raise self._wrong(f"{parameter.argument}: a header has no control characters")
            if len(text) > MAX_HEADER_CHARS:
                raise self._wrong(
                    f"{parameter.argument}: it has {len(text):,} characters, the limit for a "
                    f"header is {MAX_HEADER_CHARS:,}"
                )
            yield parameter.name, text
        cookies = [
            f"{_quoted(parameter.name)}={_quoted(','.join(_items(value)))}"
            for parameter, value in self._values("cookie")
        ]
        if cookies:
            yield "Cookie", "; ".join(cookies)

    def _body(self, body: Body) -> tuple[bytes | None, str | None]:
        value: Any
        if body.argument is not None:
            if body.argument not in self._given:
                return None, None
            value = self._given[body.argument]
        else:
            value = {name: self._given[name] for name in body.properties if name in self._given}
            if not value and not body.required:
                return None, None
        if body.media_type == "text/plain":
            text = value if isinstance(value, str) else _dumped(value)
            return text.encode(), "text/plain; charset=utf-8"
        if body.media_type == "application/x-www-form-urlencoded":
            return urlencode(_form(value)).encode(), body.media_type
        return _dumped(value).encode(), body.media_type


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _quoted(text: str) -> str:
    return quote(text, safe="")


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else _dumped(value)


def _items(value: Any, *, explode: bool = False) -> list[str]:
    """Return the texts of a value, of which an array and an object have several."""
    if isinstance(value, list):
        return [_text(each) for each in value]
    if isinstance(value, dict):
        if explode:
            return [f"{name}={_text(each)}" for name, each in value.items()]
        return [part for name, each in value.items() for part in (name, _text(each))]
    return [_text(value)]


def _in_path(parameter: Parameter, value: Any) -> str:
    """Return a value as it stands in a path, encoded."""
    if parameter.is_json:
        return _quoted(_dumped(value))
    if parameter.explode and isinstance(value, dict):
        items = [f"{_quoted(name)}={_quoted(_text(each))}" for name, each in value.items()]
    else:
        items = [_quoted(each) for each in _items(value)]
    if not any(items):
        return ""
    match parameter.style:
        case "label":
            return "." + ("." if parameter.explode else ",").join(items)
        case "matrix":
            name = _quoted(parameter.name)
            if not parameter.explode:
                return f";{name}={','.join(items)}"
            return "".join(
                f";{each if isinstance(value, dict) else f'{name}={each}'}" for each in items
            )
        case _:
            return ",".join(items)


def _pairs(parameter: Parameter, value: Any) -> list[tuple[str, str]]:
    """Return a query parameter as encoded names and values."""
    name = _quoted(parameter.name)
    if parameter.is_json:
        return [(name, _quoted(_dumped(value)))]
    if parameter.style == "deepObject" and isinstance(value, dict):
        return [(_quoted(key), _quoted(text)) for key, text in _deep(parameter.name, value)]
    if parameter.explode and isinstance(value, dict):
        return [(_quoted(key), _quoted(_text(each))) for key, each in value.items()]
    if parameter.explode and isinstance(value, list):
        return [(name, _quoted(_text(each))) for each in value]
    if isinstance(value, list | dict) and not value:
        return []
    between = {"spaceDelimited": "%20", "pipeDelimited": "%7C"}.get(parameter.style, ",")
    return [(name, between.join(_quoted(each) for each in _items(value)))]


def _deep(name: str, value: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for key, each in value.items():
        inner = f"{name}[{key}]"
        if isinstance(each, dict):
            yield from _deep(inner, each)
        elif isinstance(each, list):
            yield from ((inner, _text(one)) for one in each)
        else:
            yield inner, _text(each)


def _form(value: Any) -> list[tuple[str, str]]:
    fields = value if isinstance(value, dict) else {"value": value}
    return [
        (name, _text(one))
        for name, each in fields.items()
        if each is not None
        for one in (each if isinstance(each, list) else [each])
    ]
