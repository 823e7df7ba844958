"""What a session of a process that joined is told: the holder keeps it. Both ends."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from handrail.contract.doors.channels import Notice
from handrail.ipc.joiner.membership import Membership
from handrail.ipc.wire.connection import ConnectionLost
from handrail.session.session import HeldSession


class JoinedNotices:
    """Implements :class:`~handrail.contract.doors.channels.Notices` by asking the holder."""

    def __init__(self, session_id: str, membership: Membership) -> None:
        self._session_id = session_id
        self._membership = membership

    async def pending(self) -> Sequence[Notice]:
        return [Notice(**told) for told in await self._ask("notices")]

    async def take(self, ids: Sequence[str]) -> None:
        await self._ask("notices.take", ids=list(ids))

    async def arrived(self) -> None:
        await self._ask("notices.awaited", idle=False)

    async def awaited(self) -> bool:
        return await self._ask("notices.awaited", idle=True)

    async def _ask(self, what: str, **body: Any) -> Any:
        while True:  # each of these twice is as once
            try:
                return await self._membership.request(what, {"session": self._session_id, **body})
            except ConnectionLost:
                continue


def handlers(session_of: Callable[[str], HeldSession]) -> Mapping[str, Callable[..., Coroutine[Any, Any, Any]]]:
    """What the holder answers of it.

    :param session_of: an open one of that process, by its id
    """

    async def pending(session: str) -> list[dict[str, Any]]:
        notices = session_of(session).notices
        return [] if notices is None else [asdict(notice) for notice in await notices.pending()]

    async def take(session: str, ids: Sequence[str]) -> None:
        if (notices := session_of(session).notices) is not None:
            await notices.take(ids)

    async def awaited(session: str, idle: bool) -> bool:
        if (notices := session_of(session).notices) is None:
            return False
        if idle:
            return await notices.awaited()
        await notices.arrived()
        return True

    return {"notices": pending, "notices.take": take, "notices.awaited": awaited}
