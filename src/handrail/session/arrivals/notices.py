"""The notices of sessions: kept in the store until their agent takes them, with a way to wait for the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from handrail.arbiter.secrets.redaction import Redactor
from handrail.contract.doors.notices import MAX_PENDING, Notice
from handrail.contract.errors import UsageError
from handrail.store.database.database import Work
from handrail.store.tables.notices import NoticeTable

MAX_TEXT = 64 * 1024
"""Characters of one notice; of a longer one the beginning is kept, and it says so."""


class Noticeboard:
    """The notices of all sessions of a workspace, in the process that holds it.

    :param redactor: what must not be kept
    """

    def __init__(self, table: NoticeTable, redactor: Redactor) -> None:
        self.table = table
        self._redactor = redactor
        self._sessions: dict[str, SessionNotices] = {}

    def of(self, session_id: str) -> SessionNotices:
        """Those of one session."""
        found = self._sessions.get(session_id)
        if found is None:
            found = self._sessions[session_id] = SessionNotices(self, session_id)
        found.left = False
        return found

    def forget(self, session_id: str) -> None:
        """The session is not open any more. What waits in it is kept."""
        if (found := self._sessions.get(session_id)) is not None:
            found.left = True
            self.let_go(found)

    def let_go(self, of: SessionNotices) -> None:
        """Keep it no longer, where its session is not open and nothing runs that will leave one."""
        if of.left and not of.expects and self._sessions.get(of.session_id) is of:
            del self._sessions[of.session_id]

    async def post(self, notice: Notice, *along: Work) -> None:
        """See :meth:`handrail.contract.doors.notices.NoticeBox.post`. The session need not be open.

        :param along: what is kept together with it, or not at all
        """
        if self.table.count(notice.session_id) >= MAX_PENDING:
            raise UsageError(
                f"{MAX_PENDING:,} notices wait in session {notice.session_id}, and no more are kept; go on with the session, "
                "so that its agent hears them, or close it"
            )
        text = self._redactor.text(notice.text)
        if len(text) > MAX_TEXT:
            text = f"{text[:MAX_TEXT]}\n({len(text) - MAX_TEXT:,} more characters are left out)"
        data = None if notice.data is None else self._redactor.value(dict(notice.data))
        await self.table.post(replace(notice, text=text, data=data, source=self._redactor.text(notice.source)), *along)
        if (session := self._sessions.get(notice.session_id)) is not None:
            session.has_come(notice.source)


class SessionNotices:
    """Implements :class:`~handrail.contract.doors.notices.NoticeBox`."""

    def __init__(self, board: Noticeboard, session_id: str) -> None:
        self._board = board
        self.session_id = session_id
        self._expected: set[str] = set()
        self.left = False
        """Whether its session is not open any more."""
        self._changed = asyncio.Event()

    @property
    def expects(self) -> bool:
        """Whether something runs that will leave one."""
        return bool(self._expected)

    async def pending(self) -> Sequence[Notice]:
        return self._board.table.pending(self.session_id)

    async def take(self, ids: Sequence[str]) -> None:
        await self._board.table.take(self.session_id, ids)

    async def arrived(self) -> None:
        while not await self._changes_until(self._any):
            pass

    async def awaited(self) -> bool:
        while not await self._changes_until(lambda: self._any() or not self._expected):
            pass
        return self._any()

    async def post(self, notice: Notice) -> None:
        await self._board.post(notice)

    def expect(self, source: str) -> None:
        self._expected.add(source)

    def forget(self, source: str) -> None:
        self._expected.discard(source)
        self._board.let_go(self)
        self._ring()

    def has_come(self, source: str) -> None:
        """One is there, by ``source``."""
        self.forget(source)

    def _any(self) -> bool:
        return self._board.table.count(self.session_id) > 0

    async def _changes_until(self, seen: Callable[[], bool]) -> bool:
        """Whether it is so now; if not, return after the next change."""
        changed = self._changed
        if seen():
            return True
        await changed.wait()
        return False

    def _ring(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
