"""What was said in a session of a process that joined: the holder keeps it. Both ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any

from handrail.contract.doors.memory import Entry, History
from handrail.contract.errors import UsageError
from handrail.ipc.codec.values import some_bytes
from handrail.ipc.joiner.membership import Membership
from handrail.ipc.wire.connection import Connection, ConnectionLost
from handrail.session.session import HeldSession


class JoinedHistory:
    """Implements :class:`~handrail.contract.doors.memory.History` by asking the holder."""

    def __init__(self, session_id: str, membership: Membership) -> None:
        self._session_id = session_id
        self._membership = membership
        self._latest: Keeping | None = None

    async def read(self) -> Sequence[Entry]:
        while True:
            try:
                told = await self._membership.request("history", {"session": self._session_id})
            except ConnectionLost:
                continue
            return [(position, data) for position, data in told]

    async def attached(self, data: bytes, media_type: str) -> str:
        body = {"session": self._session_id, "data": data, "media_type": media_type}
        return await self._membership.request("attached", body, repeatable=True)

    async def attachment(self, ref: str) -> bytes:
        body = {"session": self._session_id, "ref": ref}
        return some_bytes(await self._membership.request("attachment", body, repeatable=True))

    async def compacted(self, told: Mapping[str, Any]) -> None:
        while True:  # it may be on record twice
            try:
                return await self._membership.request("compacted", {"session": self._session_id, "told": dict(told)})
            except ConnectionLost:
                continue

    async def provided(self, about: Mapping[str, Any], content: Any) -> Sequence[str]:
        body = {"session": self._session_id, "about": dict(about), "content": content}
        while True:  # what is kept is known by its content; that it was used may be on record twice
            try:
                return await self._membership.request("provided", body)
            except ConnectionLost:
                continue

    def keep(self, entries: Sequence[Entry]) -> Awaitable[None]:
        number = 1 if self._latest is None else self._latest.number + 1
        told = [[position, dict(data)] for position, data in entries]
        body = {"session": self._session_id, "entries": told, "number": number}
        self._latest = Keeping(self._membership, body, number)
        return self._latest

    async def behind(self) -> int:
        """What a call that is sent now stands behind: the number of what was last handed on to be kept, while that is on its
        way over the same connection, so that the holder has the call wait for it; 0 where it is kept.

        :raises HandrailError: when it cannot be kept
        """
        if (latest := self._latest) is not None:
            if latest.is_on_its_way:
                return latest.number
            await latest
        return 0

    async def kept(self) -> None:
        """Return once what was last handed on is durable.

        :raises HandrailError: when it cannot be kept
        """
        if self._latest is not None:
            await self._latest


class Keeping:
    """Messages on their way to the holder, whoever that is by then. Awaited as often as one likes."""

    def __init__(self, membership: Membership, body: Mapping[str, Any], number: int) -> None:
        self.number = number
        self._membership = membership
        self._sent_over: Connection | None = None
        self._work = asyncio.get_running_loop().create_task(self._keep(body))
        self._work.add_done_callback(_seen)  # nobody has to await it

    @property
    def is_on_its_way(self) -> bool:
        """Whether it went to the holder of now, before what is said to that from now on, and has no answer."""
        standing = self._membership.standing
        return not self._work.done() and standing is not None and self._sent_over is standing

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.shield(self._work).__await__()

    async def _keep(self, body: Mapping[str, Any]) -> None:
        while True:  # each has its position: keeping one twice is keeping it once
            self._sent_over = self._membership.standing
            try:
                await self._membership.request("keep", body)
            except ConnectionLost:
                continue
            return


def _seen(work: asyncio.Task[None]) -> None:
    if not work.cancelled():
        work.exception()


class HeldHistories:
    """What the holder does of it, for one process that joined.

    :param session_of: an open session of that process, by its id
    """

    def __init__(self, session_of: Callable[[str], HeldSession]) -> None:
        self._session_of = session_of
        self._taken: dict[str, int] = {}
        """By session: the number of what was taken last."""

    @property
    def handlers(self) -> Mapping[str, Callable[..., Coroutine[Any, Any, Any]]]:
        return {
            "history": self._read,
            "keep": self._keep,
            "attached": self._attached,
            "attachment": self._attachment,
            "compacted": self._compacted,
            "provided": self._provided,
        }

    def comes_behind(self, session: str, number: int) -> bool:
        """Whether a call of ``session`` comes behind what has this number; 0: behind nothing."""
        return number in (0, self._taken.get(session))

    def forget(self, session: str) -> None:
        """It is not open any more."""
        self._taken.pop(session, None)

    async def _read(self, session: str) -> Any:
        history = self._session_of(session).history
        return [] if history is None else [[position, data] for position, data in await history.read()]

    async def _keep(self, session: str, entries: Sequence[Entry], number: int) -> None:
        history = self._session_of(session).history
        if history is not None:
            kept = history.keep(entries)
            self._taken[session] = number
            await kept

    async def _attached(self, session: str, data: bytes, media_type: str) -> str:
        return await self._kept_in(session).attached(data, media_type)

    async def _attachment(self, session: str, ref: str) -> bytes:
        return await self._kept_in(session).attachment(ref)

    def _kept_in(self, session: str) -> History:
        if (history := self._session_of(session).history) is None:
            raise UsageError(f"nothing is kept of session {session}")
        return history

    async def _compacted(self, session: str, told: Mapping[str, Any]) -> None:
        if (history := self._session_of(session).history) is not None:
            await history.compacted(told)

    async def _provided(self, session: str, about: Mapping[str, Any], content: Any) -> Any:
        history = self._session_of(session).history
        return [] if history is None else list(await history.provided(about, content))
