"""An OpenAPI document: read from its text, and what its local references lead to."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import yaml

from activities.kind.yaml_value import read_yaml
from contracts.error import BadInputError

MAX_DOCUMENT_BYTES = 10_000_000
"""Large public services have documents of that size; reading YAML takes a second for each MB."""

VERSIONS = ("3.0", "3.1")

METHODS = ("get", "put", "post", "delete", "options", "head", "patch")

_HINT = "give the URL or path of an OpenAPI 3.0 or 3.1 document, as JSON or YAML"


class Document:
    """A document whose outline is as it should be; its parts are checked when they are used.

    `base` is its URL without query, if it came from one.
    """

    def __init__(self, shown: str, tree: Mapping[str, Any], base: str | None = None) -> None:
        self.shown = shown
        self.tree = tree
        self.base = base
        self.version = _version(shown, tree)
        paths = tree.get("paths")
        self.paths: Mapping[str, Any] = {} if paths is None else self.mapping(paths, "`paths`")

    def bad(self, problem: str, hint: str = "") -> BadInputError:
        """Return an error that names the document."""
        return BadInputError(f"openapi {self.shown!r}: {problem}", hint=hint)

    def mapping(self, value: Any, what: str) -> Mapping[str, Any]:
        """Return what must be an object; raises BadInputError that says what is none."""
        if not isinstance(value, dict):
            raise self.bad(f"{what} is not an object but {_named(value)}")
        return value

    def followed(self, value: Any, what: str) -> Mapping[str, Any]:
        """Return an object, or the one that its `$ref` leads to, over others if need be."""
        found = self.mapping(value, what)
        seen: list[str] = []
        while isinstance(reference := found.get("$ref"), str):
            if reference in seen:
                raise self.loop(reference)
            seen.append(reference)
            found = self.mapping(self.target(reference), f"what $ref {reference!r} leads to")
        return found

    def loop(self, reference: str) -> BadInputError:
        """Return the error of a reference that leads back to itself."""
        return self.bad(
            f"$ref {reference!r} leads back to itself and never to a definition",
            "mend the document, or choose other operations with `tools: [...]`",
        )

    def target(self, reference: str) -> Any:
        """Return what a `$ref` names in this document; raises BadInputError."""
        if not reference.startswith("#"):
            raise self.bad(
                f"$ref {reference[:200]!r} leads out of the document",
                "bundle its files into one document first",
            )
        found: Any = self.tree
        for part in pointer_parts(reference):
            if isinstance(found, dict) and part in found:
                found = found[part]
            elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            else:
                raise self.bad(f"$ref {reference[:200]!r} leads nowhere")
        return found


def pointer_parts(reference: str) -> list[str]:
    """Return the parts of a reference's JSON pointer."""
    pointer = unquote(reference[1:])
    parts = pointer.split("/")[1:] if pointer.startswith("/") else [pointer] if pointer else []
    return [part.replace("~1", "/").replace("~0", "~") for part in parts]


def parse_document(shown: str, raw: bytes, base: str | None = None) -> Document:
    """Return the document that a text holds; raises BadInputError that says what it is instead."""
    try:
        text = raw.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise _bad(shown, f"is not UTF-8 text (byte {error.start:,})") from None
    if text.startswith("<"):
        raise _bad(shown, "is HTML or XML, not an OpenAPI document")
    tree = _json(shown, text) if text.startswith(("{", "[")) else _yaml(shown, text)
    if not isinstance(tree, dict):
        raise _bad(shown, f"is not an OpenAPI document but {_named(tree)}")
    return Document(shown, tree, base)


def _json(shown: str, text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise _bad(shown, "is nested too deeply") from None
    except ValueError as error:
        raise _bad(shown, f"is not JSON: {str(error)[:200]}") from None


def _yaml(shown: str, text: str) -> Any:
    try:
        return read_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        problem = " ".join(str(error).split())[:300]
        raise _bad(shown, f"is not YAML: {problem}") from None


def _version(shown: str, tree: Mapping[str, Any]) -> str:
    if "swagger" in tree:
        raise _bad(
            shown,
            f"is of version {tree['swagger']!s:.20} (Swagger); the versions are 3.0 and 3.1",
            "convert it first: many tools do",
        )
    version = tree.get("openapi")
    if version is None:
        raise _bad(shown, "is not an OpenAPI document: it has no `openapi`")
    found = next((each for each in VERSIONS if re.match(rf"{each}(\.|$)", str(version))), None)
    if found is None:
        raise _bad(shown, f"is of version {version!s:.20}; the versions are 3.0 and 3.1")
    return found


def _bad(shown: str, problem: str, hint: str = _HINT) -> BadInputError:
    return BadInputError(f"openapi {shown!r} {problem}", hint=hint)


def _named(value: Any) -> str:
    names = {str: "a text", list: "an array", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), "a number")
