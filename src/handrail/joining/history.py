"""What was said in a session of a process that joined: the holder keeps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from handrail.contract.history import Entry
from handrail.joining.membership import Membership
from handrail.joining.wire import ConnectionLost


class JoinedHistory:
    """Implements :class:`~handrail.contract.history.History` by asking the holder."""

    def __init__(self, session_id: str, membership: Membership) -> None:
        self._session_id = session_id
        self._membership = membership

    async def read(self) -> Sequence[Entry]:
        while True:
            try:
                told = await self._membership.request("history", {"session": self._session_id})
            except ConnectionLost:
                continue
            return [(position, data) for position, data in told]

    async def provided(self, about: Mapping[str, Any], content: Any) -> Sequence[str]:
        body = {"session": self._session_id, "about": dict(about), "content": content}
        while True:  # what is kept is known by its content; that it was used may be on record twice
            try:
                return await self._membership.request("provided", body)
            except ConnectionLost:
                continue

    async def keep(self, entries: Sequence[Entry]) -> None:
        body = {"session": self._session_id, "entries": [[position, dict(data)] for position, data in entries]}
        while True:  # each has its position: keeping one twice is keeping it once
            try:
                await self._membership.request("keep", body)
            except ConnectionLost:
                continue
            return
