"""The workspaces that an editor works in: each has one kernel, opened by the first session in it and closed with the last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from acp import schema

if TYPE_CHECKING:
    from handrail.kernel.kernel import Kernel

McpServer = schema.HttpMcpServer | schema.SseMcpServer | schema.AcpMcpServer | schema.McpServerStdio
Opening = Callable[[str], "AbstractAsyncContextManager[Kernel]"]


@dataclass(eq=False, slots=True)
class _Place:
    """One open workspace. Its kernel is opened and closed in a task of its own: whoever asks first may be cancelled."""

    ready: asyncio.Future[Kernel]
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    users: int = 0
    task: asyncio.Task[None] | None = None


class Places:
    """
    :param opening: how a workspace is opened
    """

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._places: dict[str, _Place] = {}

    async def enter(self, folder: str) -> Kernel:
        """The kernel of a workspace; whoever has got it calls :meth:`leave` once.

        :param folder: canonical
        :raises HandrailError: where it cannot be opened
        """
        while (place := self._places.get(folder)) is not None and place.leave.is_set():
            assert place.task is not None
            await asyncio.wait((place.task,))
        if place is None:
            place = _Place(asyncio.get_running_loop().create_future())
            self._places[folder] = place
            place.task = asyncio.create_task(self._keep(folder, place))
        place.users += 1
        try:
            return await asyncio.shield(place.ready)
        except BaseException:
            self._left(place)
            raise

    async def leave(self, folder: str) -> None:
        """Close it where this was its last user."""
        if (place := self._places.get(folder)) is None:  # all were closed meanwhile
            return
        self._left(place)
        if place.leave.is_set() and place.task is not None:
            await asyncio.wait((place.task,))

    @staticmethod
    def _left(place: _Place) -> None:
        place.users -= 1
        if not place.users:
            place.leave.set()

    async def _keep(self, folder: str, place: _Place) -> None:
        try:
            async with self._opening(folder) as kernel:
                place.ready.set_result(kernel)
                await place.leave.wait()
        except Exception as error:
            if place.ready.done():
                raise
            place.ready.set_exception(error)
        finally:
            del self._places[folder]

    async def aclose(self) -> None:
        """Close all of them."""
        tasks = [place.task for place in self._places.values() if place.task is not None]
        for place in self._places.values():
            place.leave.set()
        if tasks:
            await asyncio.wait(tasks)


def remarks_on(kernel: Kernel, servers: Sequence[McpServer]) -> list[str]:
    """What is said of the MCP servers that a client names: those that the operator has configured under the same name are
    there already; another one is not started because a client says so."""
    own = {status.name for status in kernel.mcp.servers}
    others = sorted({server.name[:80] for server in servers} - own)
    if not others:
        return []
    names = ", ".join(repr(name) for name in others)
    return [
        f"[These MCP servers of the editor are not used: {names}. Handrail starts none that nobody has installed, enabled "
        "and given its hosts here: put them under [mcp.servers] of handrail.toml, or see handrail mcp import --help.]"
    ]
