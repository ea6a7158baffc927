"""Sessions with MCP servers, kept between calls: one per tenant and resolved configuration."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from activities.mcp.endpoint import Endpoint
from activities.mcp.session import Session
from contracts.error import UnavailableError

MAX_SESSIONS = 64
"""Sessions of one tool worker, each of which may be a process; idle ones make room."""

IDLE_S = 300.0
"""How long a session that nobody uses is kept."""


class SessionPool:
    """Opens, shares and ends sessions; all of them live on one event loop."""

    def __init__(self, scrub: Callable[[str], str], max_sessions: int = MAX_SESSIONS) -> None:
        self._scrub = scrub
        self._max_sessions = max_sessions
        self._kept: dict[Endpoint, Session] = {}
        self._alive: set[Session] = set()
        self._idle: dict[Session, asyncio.TimerHandle] = {}

    @asynccontextmanager
    async def session(self, endpoint: Endpoint, connect_s: float) -> AsyncIterator[Session]:
        """Give out the endpoint's session, connected, answering; raises MusterError, HttpError."""
        session = self._take(endpoint, connect_s)
        try:
            await session.ready()
            if session.is_suspect and not await session.answers():
                self.retire(session)
                self._give_back(session)
                session = self._take(endpoint, connect_s)
                await session.ready()
            yield session
        finally:
            self._give_back(session)

    def retire(self, session: Session) -> None:
        """Let no further call begin in a session; it ends once its last user has gone."""
        if self._kept.get(session.endpoint) is session:
            del self._kept[session.endpoint]

    async def close(self) -> None:
        """End all sessions, with their server processes."""
        for session in self._alive:
            session.close()
        for session in list(self._alive):
            await session.ended()

    def _take(self, endpoint: Endpoint, connect_s: float) -> Session:
        session = self._kept.pop(endpoint, None)
        if session is None or session.is_closing:
            self._make_room()
            session = Session(endpoint, self._scrub, self._forget)
            self._alive.add(session)
            session.open(connect_s)
        self._kept[endpoint] = session  # again the last: the first is the longest unused
        session.users += 1
        if timer := self._idle.pop(session, None):
            timer.cancel()
        return session

    def _give_back(self, session: Session) -> None:
        session.users -= 1
        if session.users:
            return
        if self._kept.get(session.endpoint) is not session:
            session.close()
        elif session in self._alive:
            loop = asyncio.get_running_loop()
            self._idle[session] = loop.call_later(IDLE_S, session.close)

    def _make_room(self) -> None:
        """End idle sessions, the longest unused first; raises UnavailableError if all are busy."""
        open_now = [each for each in self._alive if not each.is_closing]
        idle = [each for each in self._kept.values() if not each.users and not each.is_closing]
        surplus = len(open_now) - self._max_sessions + 1
        if surplus > len(idle):
            raise UnavailableError(
                f"the tool worker has {len(open_now)} sessions with MCP servers, all in use, "
                f"the limit is {self._max_sessions}",
                hint="add a tool worker, or let fewer tenants or configurations run at once",
            )
        for session in idle[: max(surplus, 0)]:
            session.close()

    def _forget(self, session: Session) -> None:
        """Drop a session that has ended."""
        self._alive.discard(session)
        self.retire(session)
        if timer := self._idle.pop(session, None):
            timer.cancel()
