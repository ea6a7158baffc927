"""Secrets by reference: `${env:NAME}` and `${file:PATH}`, put in place only for a call.

Agent files, Temporal histories and the store hold the reference. The value is read by the tool
worker each time, so that a changed secret needs no restart, and is taken out again of every text
that leaves the worker: results, errors, log lines.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, quote_plus

from contracts.error import BadInputError

REFERENCE = re.compile(r"\$\{(env|file):([^{}\s]+)\}")

MAX_SECRET_BYTES = 65_536
"""Size of a secret's value: a key, a token, a certificate."""

MAX_SECRETS = 1_024
"""Values that one process takes out of texts; the oldest is forgotten first."""

MIN_SCRUBBED_CHARS = 4
"""A shorter value stands in texts by chance; taking it out would garble them."""

SCRUBBED = "[secret]"

OURS = ("MUSTER_", "TEMPORAL_")
"""What the stack itself is configured by is no tool's business."""


class Secrets:
    """Reads values for references, and remembers them to take them out of texts."""

    def __init__(self) -> None:
        self._known: dict[str, None] = {}

    def reveal(self, tool: str, text: str) -> str:
        """Return `text` with values for its references; raises BadInputError that names one."""
        return REFERENCE.sub(lambda found: self._value(tool, found[1], found[2]), text)

    def reveal_all(self, tool: str, texts: Mapping[str, str]) -> dict[str, str]:
        """Return a mapping with values for the references in its values."""
        return {key: self.reveal(tool, text) for key, text in texts.items()}

    def scrub(self, text: str) -> str:
        """Return `text` without the values read so far, as they are or as usually encoded."""
        for value in sorted(self._known, key=len, reverse=True):
            text = text.replace(value, SCRUBBED)
        return text

    def remember(self, value: str) -> None:
        """Take `value` out of texts too: one that was made of a secret."""
        for form in _forms(value):
            self._known.pop(form, None)
            self._known[form] = None
        while len(self._known) > MAX_SECRETS:
            del self._known[next(iter(self._known))]

    def _value(self, tool: str, source: str, name: str) -> str:
        value = _from_env(tool, name) if source == "env" else _from_file(tool, name)
        self.remember(value)
        return value


def _from_env(tool: str, name: str) -> str:
    reference = f"${{env:{name}}}"
    if name.startswith(OURS):
        raise BadInputError(
            f"tool {tool!r}: {reference} names a variable of the stack's own",
            hint="give the tool's secret a variable of its own",
        )
    value = os.environ.get(name)
    if not value:
        raise BadInputError(
            f"tool {tool!r}: {reference} names a variable that the tool worker does not have",
            hint=f"set {name} where `muster up` or the tool worker is started",
        )
    return value


def _from_file(tool: str, name: str) -> str:
    reference, path = f"${{file:{name}}}", Path(name)
    hint = "give the absolute path of a small text file that the tool worker may read"
    if not path.is_absolute():
        raise BadInputError(f"tool {tool!r}: the path in {reference} is not absolute", hint=hint)
    try:
        if not path.is_file():
            raise BadInputError(f"tool {tool!r}: {reference} names no file", hint=hint)
        size = path.stat().st_size
        if size > MAX_SECRET_BYTES:
            raise BadInputError(
                f"tool {tool!r}: the file of {reference} has {size:,} bytes, "
                f"the limit is {MAX_SECRET_BYTES:,} bytes",
                hint=hint,
            )
        value = path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(
            f"tool {tool!r}: {reference} cannot be read: {type(error).__name__}", hint=hint
        ) from None
    if not value:
        raise BadInputError(f"tool {tool!r}: the file of {reference} is empty", hint=hint)
    return value


def _forms(value: str) -> list[str]:
    """Return the ways in which a value may stand in a text."""
    plain = value.encode()
    forms = {
        value,
        *(quote(value, safe=safe) for safe in ("", "/", "/?")),
        quote_plus(value),
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        base64.b64encode(plain).decode(),
    }
    return [each for each in sorted(forms) if len(each) >= MIN_SCRUBBED_CHARS]
