"""What the holder asks of a process that joined, for that process's sessions: its people, its client and its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from handrail.contract.approvals import Attendant
from handrail.contract.doors.agents import NO_MODEL, Delegates
from handrail.contract.doors.peer import Buffers, Peer
from handrail.contract.errors import ToolError, UsageError
from handrail.ipc.codec.interfaces import Request, heeding, op_of, served
from handrail.ipc.holder.remote import BUFFERS, CLIENT, MODEL, PEOPLE
from handrail.ipc.joiner.session import JoinedSession
from handrail.ipc.wire.operations import Op
from handrail.runtime.surface import NOBODY_TO_ASK

NO_CLIENT = "no client is attached to this session"


class Serving:
    """Answers the holder for the sessions of this process.

    :param session_of: one of them, also while it is being opened; None where it is none
    """

    def __init__(self, session_of: Callable[[str], JoinedSession | None]) -> None:
        self._session_of = session_of
        requests: dict[str, Request] = {
            **served(Attendant, PEOPLE, self._attendant),
            **served(Peer, CLIENT, self._peer),
            **served(Buffers, BUFFERS, self._buffers),
            **served(Delegates, MODEL, self._delegates),
        }
        # Asked again by the next holder: an answer to this one would reach nobody.
        self.requests: Mapping[str, Op] = {
            name: op_of(name, one, cancel_when_lost=True) for name, one in requests.items()
        }
        self.notices: Mapping[str, Callable[[Any], None]] = {"client.let_go": heeding(self._let_go)}

    def _attendant(self, people_of: str) -> Attendant:
        session = self._session_of(people_of)
        if session is None or session.attendant is None:
            raise UsageError(NOBODY_TO_ASK)
        return session.attendant

    def _peer(self, session: str) -> Peer:
        found = self._session_of(session)
        if found is None or found.peer is None:
            raise UsageError(NO_CLIENT)
        return found.peer

    def _buffers(self, session: str) -> Buffers:
        peer = self._peer(session)
        if not isinstance(peer, Buffers):
            raise UsageError(NO_CLIENT)
        return peer

    def _delegates(self, session: str) -> Delegates:
        found = self._session_of(session)
        if found is None or found.delegates is None:
            raise ToolError(NO_MODEL, kind="unavailable")
        return found.delegates

    def _let_go(self, session: str, call: str) -> None:
        found = self._session_of(session)
        if found is not None and found.peer is not None:
            found.peer.let_go(call)
