"""Who waits for an item that the writer was given, and until when: for the disk, or until it can be read as well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import Any

from handrail.contract.errors import LogUnavailable

Waiting = asyncio.Future[None]


class Kept(asyncio.Future[None]):
    """Tells whether an item became durable, for somebody who does not read it back."""


class Written(asyncio.Future[None]):
    """Tells whether an item became durable. Whoever awaits it goes on only once that is known: a cancellation of their task
    is raised then, and not before."""

    def cancel(self, msg: object = None) -> bool:
        """Refused: the item is with the writer, and what becomes of it has to be known."""
        return False


class Promised(Written):
    """As :class:`Written`, for an item that has to be durable as soon as can be, and may be read a moment later."""


class Taken:
    """An item that has its place in the queue, and will be written with its neighbours soon. Whoever awaits it, as often as
    they like, hurries it along and goes on once it and everything before it is durable.

    :raises LogUnavailable: when awaited, where it could not be written; it will not be written later
    """

    __slots__ = ("_hurry", "_written")

    def __init__(self, written: asyncio.Future[None], hurry: Callable[[], None]) -> None:
        self._written = written
        self._hurry = hurry

    @property
    def failure(self) -> BaseException | None:
        """Why it was not written, once that is known."""
        return self._written.exception() if self._written.done() else None

    @property
    def durable(self) -> bool:
        """Whether it is known to be."""
        return self._written.done() and self._written.exception() is None

    def written(self) -> asyncio.Future[None]:
        """Hurry it along, and give what tells that it is durable."""
        if not self._written.done():
            self._hurry()
        return asyncio.shield(self._written)

    def __await__(self) -> Generator[Any, None, None]:
        return self.written().__await__()


def settle(futures: Sequence[asyncio.Future[Any]], failure: str | None) -> None:
    """Answer callers, in their own loop's thread."""
    for future in futures:
        if not future.done():
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(LogUnavailable(failure))
                if isinstance(future, Kept):
                    future.exception()  # seen: nobody has to await it
