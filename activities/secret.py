"""Secrets by reference: `${env:NAME}` and `${file:PATH}`, put in place only for a call.

Agent files, Temporal histories and the store hold the reference. The value is read by the tool
worker each time, so that a changed secret needs no restart, and is taken out again of every text
that leaves the worker: results, errors, log lines.

A text is looked through for the value as it is, as JSON, Python, HTML, URLs and hexadecimal digits
write it, and for its base64, alone or inside a longer text's, as in `Authorization: Basic`. Of a
value of several lines each long line counts for itself, since logs come line by line. What a tool
compresses, encrypts, or prints character by character is not recognised.
"""

from __future__ import annotations

import base64
import html
import json
import os
import re
from collections.abc import Iterator, Mapping
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

MIN_ENCODED_CHARS = 8
"""The same for base64 and hexadecimal digits: fewer of them stand for too little."""

MIN_LINE_CHARS = 16
"""The same for one line of a value of several lines."""

SCRUBBED = "[secret]"

_ESCAPED = re.compile(r"%[0-9A-F]{2}")

OURS = ("MUSTER_", "TEMPORAL_")
"""What the stack itself is configured by is no tool's business."""


class Secrets:
    """Reads values for references, and remembers them to take them out of texts."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, ...]] = {}
        self._forms: tuple[str, ...] = ()
        """All that is taken out, longest first; threads read it while a call adds to it."""

    def reveal(self, tool: str, text: str) -> str:
        """Return `text` with values for its references; raises BadInputError that names one."""
        return REFERENCE.sub(lambda found: self._value(tool, found[1], found[2]), text)

    def reveal_all(self, tool: str, texts: Mapping[str, str]) -> dict[str, str]:
        """Return a mapping with values for the references in its values."""
        return {key: self.reveal(tool, text) for key, text in texts.items()}

    def scrub(self, text: str) -> str:
        """Return `text` without the values read so far, as they are or as usually encoded."""
        for form in self._forms:
            text = text.replace(form, SCRUBBED)
        return text

    def remember(self, value: str) -> None:
        """Take `value` out of texts too: one that was made of a secret."""
        known = self._known.pop(value, None)
        self._known[value] = known or tuple(_forms(value))
        while len(self._known) > MAX_SECRETS:
            del self._known[next(iter(self._known))]
        if known is None:
            forms = {form for each in self._known.values() for form in each}
            self._forms = tuple(sorted(forms, key=lambda form: (-len(form), form)))

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


def _forms(value: str) -> Iterator[str]:
    """Yield the ways in which a value may stand in a text."""
    lines = [line.strip() for line in value.splitlines()]
    long = [line for line in lines if len(line) >= MIN_LINE_CHARS and not line.startswith("-----")]
    for part in dict.fromkeys((value, *(long if len(lines) > 1 else ()))):
        yield from (form for form in _written(part) if len(form) >= MIN_SCRUBBED_CHARS)
    plain = value.encode()
    yield from (form for form in _encoded(plain) if len(form) >= MIN_ENCODED_CHARS)


def _written(value: str) -> Iterator[str]:
    """Yield a value as it is, and with the escapes that texts of other kinds need."""
    yield value
    for safe in ("", "/", "/?"):
        yield quote(value, safe=safe)
        yield _ESCAPED.sub(lambda found: found[0].lower(), quote(value, safe=safe))
    yield quote_plus(value)
    yield json.dumps(value)[1:-1]
    yield json.dumps(value, ensure_ascii=False)[1:-1]
    yield repr(value)[1:-1]
    yield repr(value + "'\"")[1:-4]  # beside quotes of both kinds
    yield html.escape(value)
    yield html.escape(value, quote=False)


def _encoded(plain: bytes) -> Iterator[str]:
    """Yield the digits of bytes, and what is theirs alone in the base64 of any text around them."""
    yield plain.hex()
    yield plain.hex().upper()
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        yield encode(plain).decode()
        for before in range(3):
            text = encode(bytes(before) + plain).decode().rstrip("=")
            is_whole = (before + len(plain)) % 3 == 0
            yield text[(0, 2, 3)[before] : len(text) if is_whole else -1]
