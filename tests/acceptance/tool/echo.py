"""Tools that give away the secret they know: in results, in errors, in what they print and log."""

from __future__ import annotations

import asyncio
import base64
import gc
import logging
import os
import sys
import threading
import warnings
from urllib.parse import quote

from pydantic import BaseModel, model_serializer

_log = logging.getLogger("shop.client")


def _token() -> str:
    return os.environ["SHOP_TOKEN"]


def says() -> str:
    """Return it in a sentence."""
    return f"The token is {_token()}, as you know."


def tells() -> dict[str, object]:
    """Return it as a key and a value of nested data."""
    return {_token(): [{"token": _token()}], "raw": _token().encode()}


def encodes() -> dict[str, str]:
    """Return it as protocols write it."""
    token = _token().encode()
    return {
        "base64": base64.b64encode(token).decode(),
        "basic": base64.b64encode(b"shop:" + token).decode(),
        "bearer": base64.urlsafe_b64encode(b"x" + token + b"y").decode(),
        "hex": token.hex(),
        "url": f"https://shop.example/?key={quote(_token(), safe='')}",
    }


def repeats() -> str:
    """Return it so often that the store keeps the text."""
    return f"{_token()} " * 2_000


def prints() -> str:
    """Print it and log it in every way there is."""
    print("token", _token())  # noqa: T201 - what a tool does
    print(_token(), file=sys.stderr)  # noqa: T201
    _log.warning("token %s", _token(), extra={"token": _token()})
    warnings.warn(_token(), stacklevel=1)
    try:
        raise RuntimeError(_token())
    except RuntimeError:
        _log.exception("refused")
    thread = threading.Thread(target=refuses)
    thread.start()
    thread.join()
    return "printed"


async def forgets() -> str:
    """Leave a task behind whose error nobody looks at."""

    async def fail() -> None:
        raise RuntimeError(_token())

    task = asyncio.create_task(fail())
    await asyncio.wait({task})
    del task
    gc.collect()
    return "forgotten"


def refuses() -> str:
    """Say no, which is what the model reads."""
    raise ValueError(f"no customer has {_token()}")


def breaks() -> str:
    """Fail as a bug does, with a cause."""
    try:
        raise KeyError(_token())
    except KeyError as error:
        raise RuntimeError(f"{_token()} is no number") from error


def drops() -> str:
    """Fail as a network does."""
    raise ConnectionError(f"https://shop:{quote(_token(), safe='')}@shop.example hung up")


class _Broken(BaseModel):
    @model_serializer
    def _fail(self) -> str:
        raise RuntimeError("x" * 436 + _token())


def garbles() -> object:
    """Return what cannot become text, with a reason that is cut."""
    return {"value": _Broken()}
