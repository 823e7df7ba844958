"""The catalog, for a tool that runs here for a call that is carried out in another process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from handrail.contract.doors.jobs import BroughtIn, Category, Findings, Manual


class RemoteCatalog:
    """Implements :class:`~handrail.contract.doors.jobs.Catalog`.

    :param ask: asks a door of the call's runtime in the holder
    """

    def __init__(self, ask: Callable[..., Awaitable[Any]]) -> None:
        self._ask = ask

    async def active(self) -> Sequence[str]:
        return await self._ask("catalog.active")

    async def categories(self) -> Sequence[Category]:
        return await self._ask("catalog.categories")

    async def load(self, name: str, *, kind: Literal["category", "tool"] | None = None) -> BroughtIn:
        return await self._ask("catalog.load", name=name, kind=kind)

    async def search(self, query: str, *, limit: int = 5, extensions_only: bool = False) -> Findings:
        return await self._ask("catalog.search", query=query, limit=limit, extensions_only=extensions_only)

    async def manual(self, tool: str) -> Manual:
        return await self._ask("catalog.manual", tool=tool)
