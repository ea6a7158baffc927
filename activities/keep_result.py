"""The `keep_result` activity: a large result of somebody else's activity goes to the store.

Our own tools' results do so where they are made. Another worker knows nothing of the store, so the
workflow hands its result on, and goes on with a reference.
"""

from __future__ import annotations

from pydantic_core import to_json
from temporalio import activity

from activities.error_map import application_error
from activities.result import Rendered
from contracts.error import MusterError
from contracts.name import KEEP_RESULT
from contracts.tool import KeepResultInput, KeptResult
from store.context import ContextStore
from store.database import Database


class KeepResult:
    """Stores results by their content, so that storing one again changes nothing."""

    def __init__(self, database: Database) -> None:
        self._contexts = ContextStore(database)

    @activity.defn(name=KEEP_RESULT)
    async def keep_result(self, given: KeepResultInput) -> KeptResult:
        """Store a text; return its name and a preview of it."""
        size = len(to_json(given.content)) - len('""')
        try:
            blob = await self._contexts.put_text(given.content)
        except MusterError as error:
            raise application_error(error) from None
        return KeptResult(preview=Rendered(given.content, size).preview(), blob=blob)
