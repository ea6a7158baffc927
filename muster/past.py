"""What PostgreSQL knows of jobs, for whoever reads about them."""

from __future__ import annotations

from collections.abc import Mapping

from contracts.llm_step import Usage
from contracts.message import Message
from muster.archive import decode_history
from muster.history import Run
from store.archive import HistoryArchive
from store.context import ContextStore, NotStoredError
from store.database import Database
from store.step_usage import step_usage


class Past:
    """The archived runs of jobs, their conversations, and the ledger of their steps."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._archive = HistoryArchive(database)
        self._is_checked = False

    async def run(self, job_id: str, run_id: str) -> Run | None:
        """Return one archived run."""
        await self._check()
        chunks = await self._archive.chunks(job_id, run_id)
        return Run(run_id, decode_history(chunks)) if chunks else None

    async def last_run(self, job_id: str) -> Run | None:
        """Return the archived run of a job that closed last."""
        await self._check()
        runs = await self._archive.runs(job_id)
        return await self.run(job_id, runs[-1].run_id) if runs else None

    async def usage(self, job_id: str) -> Mapping[str, Usage]:
        """Return the tokens of a job's steps by their ids, from the ledger."""
        await self._check()
        steps = await self._database.transact(lambda connection: step_usage(connection, job_id))
        return {step_id: step.usage for step_id, step in steps.items()}

    async def conversation(self, head: str) -> list[Message]:
        """Return a stored conversation; raises NotStoredError."""
        await self._check()
        return await ContextStore(self._database).load(head)

    async def text(self, digest: str) -> str | None:
        """Return a text that is stored by its content hash; None if there is none."""
        await self._check()
        try:
            text = await ContextStore(self._database).get_blob(digest)
        except NotStoredError:
            return None
        return text if isinstance(text, str) else None

    async def _check(self) -> None:
        if not self._is_checked:
            await self._database.check()
            self._is_checked = True
