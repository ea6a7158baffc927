"""A job's input text: where it comes from, and what it must be like before a job is started."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from contracts.error import BadInputError, LimitExceededError
from contracts.limit import MAX_INPUT_BYTES

_TOO_LONG_HINT = "put long documents into files and let the agent read them with a tool"


def read_input(argument: str, stdin: BinaryIO, what: str = "input") -> str:
    """Return the `what` that a command line names: itself, `@FILE`, or `-` for standard input.

    Raises `BadInputError` for a file that cannot be read or is no text, `LimitExceededError` for
    one that is too long.
    """
    if argument == "-":
        return check_input(_decode(stdin.read(MAX_INPUT_BYTES + 1), "standard input"), what)
    if argument.startswith("@"):
        return check_input(_read_file(Path(argument[1:])), what)
    return check_input(argument, what)


def check_input(text: str, what: str = "input") -> str:
    """Return `text` if a job can read it, as its `what`; raises what `read_input` raises."""
    surrogate = next((at for at, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
    if surrogate is not None:
        raise BadInputError(
            f"the {what} is not valid Unicode at character {surrogate + 1:,}: {text[surrogate]!r}",
            hint="give it as UTF-8 text",
        )
    size = len(text.encode())
    if size > MAX_INPUT_BYTES:
        raise LimitExceededError(f"the {what}", size, MAX_INPUT_BYTES, "bytes", hint=_TOO_LONG_HINT)
    if not text.strip():
        raise BadInputError(
            f"the {what} is empty", hint="say what the agent shall do, or name a file with @FILE"
        )
    if "\0" in text:
        raise BadInputError(
            f"the {what} has a NUL character at character {text.index(chr(0)) + 1:,}",
            hint=f"the {what} is text; binary files are for tools to read",
        )
    return text


def _read_file(path: Path) -> str:
    try:
        size = path.stat().st_size
        if path.is_dir():
            raise BadInputError(f"input file {str(path)!r} is a directory", hint="name a text file")
        with path.open("rb") as stream:
            raw = stream.read(MAX_INPUT_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadInputError(
            f"input file {str(path)!r} cannot be read: {reason}",
            hint="@FILE reads the input from a file; input that begins with @ can come from `-`",
        ) from None
    if len(raw) > MAX_INPUT_BYTES:
        raise LimitExceededError(
            f"input file {str(path)!r}", max(size, len(raw)), MAX_INPUT_BYTES, "bytes",
            hint=_TOO_LONG_HINT,
        )  # fmt: skip
    return _decode(raw, f"input file {str(path)!r}")


def _decode(raw: bytes, name: str) -> str:
    if len(raw) > MAX_INPUT_BYTES:
        raise BadInputError(
            f"{name} has more than the limit of {MAX_INPUT_BYTES:,} bytes", hint=_TOO_LONG_HINT
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInputError(
            f"{name} is not UTF-8 text: byte {error.start + 1:,} is 0x{raw[error.start]:02x}",
            hint="the input is text; binary files are for tools to read",
        ) from None
