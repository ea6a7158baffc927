"""Sessions with MCP servers, kept between calls: one per tenant and resolved configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from activities.mcp.endpoint import Endpoint
from activities.mcp.session import Session, SessionLostError
from contracts.error import UnavailableError

T = TypeVar("T")

MAX_SESSIONS = 64
"""Sessions of one tool worker, each of which may be a process; idle ones make room."""

IDLE_S = 300.0
"""How long a session that nobody uses is kept."""


class SessionPool:
    """Opens, shares and ends sessions; all of them live on one event loop."""

    def __init__(self, scrub: Callable[[str], str], max_sessions: int | None = None) -> None:
        self._scrub = scrub
        self._max_sessions = MAX_SESSIONS if max_sessions is None else max_sessions
        self._kept: dict[Endpoint, Session] = {}
        self._alive: set[Session] = set()
        self._idle: dict[Session, asyncio.TimerHandle] = {}

    async def use(
        self, endpoint: Endpoint, connect_s: float, work: Callable[[Session], Awaitable[T]]
    ) -> T:
        """Do `work` in the endpoint's session, connected and answering; raises what it raises.

        A server that had forgotten the session has done nothing: then once more, in a new one.
        """
        try:
            return await self._once(endpoint, connect_s, work)
        except SessionLostError:
            pass
        try:
            return await self._once(endpoint, connect_s, work)
        except SessionLostError as error:
            raise error.refusal from None

    async def _once(
        self, endpoint: Endpoint, connect_s: float, work: Callable[[Session], Awaitable[T]]
    ) -> T:
        session = await self._answering(endpoint, connect_s)
        try:
            return await work(session)
        except SessionLostError:
            self.retire(session)
            raise
        finally:
            self._give_back(session)

    async def _answering(self, endpoint: Endpoint, connect_s: float) -> Session:
        session = await self._connected(endpoint, connect_s)
        if not session.is_suspect:
            return session
        answers = False
        try:
            answers = await session.answers()
        finally:
            if not answers:
                self._give_back(session)
        if answers:
            return session
        self.retire(session)
        return await self._connected(endpoint, connect_s)

    async def _connected(self, endpoint: Endpoint, connect_s: float) -> Session:
        session = self._take(endpoint, connect_s)
        try:
            await session.ready()
        except BaseException:
            self._give_back(session)
            raise
        return session

    def retire(self, session: Session) -> None:
        """Let no further call begin in a session; it ends once its last user has gone."""
        if self._kept.get(session.endpoint) is session:
            del self._kept[session.endpoint]
        if not session.users:
            session.close()

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
