"""Which database the parts of a stack use; without their imports, so that each can ask."""

from __future__ import annotations

from contracts.error import BadInputError
from muster.settings import Settings
from muster.stack.state import locate


def database_url(settings: Settings) -> str:
    """Return the database's URL, or raise BadInputError if nothing names one."""
    if url := locate(settings).database_url:
        return url
    raise BadInputError(
        "no database is known", hint="start the stack with `muster up`, or set MUSTER_DATABASE_URL"
    )
