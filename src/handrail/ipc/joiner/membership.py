"""The joining side: one connection to whoever holds the workspace, made again with the next holder when it is lost.

When the holder goes, one of those who joined takes its place: it puts the kernel together in its own process, and
everybody, itself included, joins that one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from handrail.contract.errors import HandrailError, StartError, UsageError
from handrail.ipc.codec.mirror import error_of
from handrail.ipc.wire.connection import Connection, ConnectionLost
from handrail.ipc.wire.framing import Message
from handrail.ipc.wire.meeting import NoAnswer, NoHolder, NotLetIn, connect
from handrail.ipc.wire.operations import LEAVING, Operations, Refused
from handrail.store.folders import Folders
from handrail.store.lease import Holder, holder_of

logger = logging.getLogger("handrail.ipc")

_CLOSED = "this kernel is closed; open one anew"
_RETRY_S = 0.05
_LOOK_S = 0.5
_PATIENCE_S = 10.0
"""How long a process waits for the next holder after the last one was lost."""
_GREETING_S = 1.0
"""How long a holder may take to greet. One that is paused does not, and is replaced two seconds after its last sign of life.
One that is alive but late is given longer from the third attempt on: otherwise, on a busy machine, it would be left each time
just before it answers."""
_LONG_S = 30.0
"""How long a holder may be late in all."""


class Membership:
    """This process's place among those who share the workspace.

    :param take_over: tries to hold the workspace in this process; True when it does now
    :param hello: what this process says of itself and brings
    :param operations: what a holder may ask of it
    """

    def __init__(
        self,
        folders: Folders,
        take_over: Callable[[], Awaitable[bool]],
        hello: Callable[[], Message],
        operations: Operations,
    ) -> None:
        self._folders = folders
        self._take_over = take_over
        self._hello = hello
        self._operations = operations
        self._connection: Connection | None = None
        self._search: asyncio.Task[Connection] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.token: int = 0
        """The fencing token of the last holder that was joined, which identifies it."""
        self.joined: list[Callable[[Connection], Awaitable[None]]] = []
        """Awaited with each new connection, before any request is sent over it."""

    async def connection(self) -> Connection:
        """The connection to the current holder. Waits for the next holder when the last one is lost.

        :raises StartError: when there is none to be had
        :raises UsageError: when this kernel is closed
        """
        if self._closed:
            raise UsageError(_CLOSED)
        if self._search is not None and self._search.done():
            # The loop has not told it yet. Whoever asks again and again would never let it.
            self._found(self._search)
        if self._search is None and self.standing is not None:
            return self.standing
        if self._search is None:
            self._search = asyncio.get_running_loop().create_task(self._joined())
            self._search.add_done_callback(self._found)
        search = self._search
        try:
            return await asyncio.shield(search)
        except asyncio.CancelledError:
            if search.cancelled() and not _is_cancelled():  # the kernel was closed, not this task
                raise UsageError(_CLOSED) from None
            raise

    @property
    def standing(self) -> Connection | None:
        """The connection to the current holder; None when it is lost."""
        return None if self._connection is None or self._connection.lost is not None else self._connection

    async def request(self, op: str, body: Any = None, *, settle: bool = False, repeatable: bool = False) -> Any:
        """Ask the holder. A request that never reached it, or that it refused because it was leaving, is sent to the next one.

        :param repeatable: done twice it is as done once: asked of the next holder also where nobody knows whether the last
            one did it
        :raises ConnectionLost: when it went after it was asked, unless that is ``repeatable``
        :raises HandrailError: as the holder said
        """
        while True:
            connection = self._connection
            if connection is None or connection.lost is not None or self._search is not None or self._closed:
                connection = await self.connection()
            try:
                number, answer = connection.ask(op, body)
                try:
                    return await answer
                except asyncio.CancelledError:
                    await connection.give_up(number, settle=settle)
                    raise
            except ConnectionLost as lost:
                if lost.sent and not repeatable:
                    raise
            except Refused as refused:
                if refused.kind != LEAVING:
                    raise error_of(refused) from None
                await connection.closed.wait()

    def tell(self, op: str, body: Mapping[str, Any]) -> None:
        """Tell the holder of now, if there is one. What must last is told again in :attr:`joined`."""
        if self._connection is not None:
            self._connection.notify(op, body)

    async def aclose(self) -> None:
        """Leave. Sessions of this process are suspended when their calls have ended."""
        self._closed = True
        ending: list[asyncio.Task[Any]] = [task for task in (self._search, self._watch) if task is not None]
        ending += self._tasks
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        if self._connection is not None:
            await self._connection.aclose("the process that joined ends")

    async def _joined(self) -> Connection:
        loop = asyncio.get_running_loop()
        began = loop.time()
        deadline, late = began + _PATIENCE_S, 0
        while True:
            greeting_s, asked = _GREETING_S * 2 ** max(0, late - 1), loop.time()
            try:
                connection = await self._attempt(greeting_s)
            except NoHolder as error:
                problem = str(error)
            except NoAnswer as error:
                problem = str(error)
                deadline, late = began + _LONG_S, late + (loop.time() - asked >= greeting_s)
            except NotLetIn as error:
                if error.kind != LEAVING:
                    told = error_of(Refused(error.kind, _told(error)))
                    raise (error if isinstance(told, Refused) else told) from None
                problem = str(error)
            else:
                # Whatever is told from here on goes to this holder; what was told before, it hears now.
                self._connection = connection
                self.token = connection.about["token"]
                try:
                    for joined in tuple(self.joined):
                        await joined(connection)
                except (ConnectionLost, Refused) as error:  # this one has gone as well, or is about to
                    problem = str(error)
                    connection.drop("joining was given up", quietly=True)
                else:
                    return connection
            if loop.time() >= deadline:
                raise StartError(
                    f"the workspace {self._folders.workspace} has been without a process that answers for "
                    f"{deadline - began:g} s: {problem}"
                )
            await asyncio.sleep(_RETRY_S)

    async def _attempt(self, greeting_s: float) -> Connection:
        """Join the holder of now, or become it and join that.

        :param greeting_s: how long it may take to greet
        :raises StartError: when neither worked this time
        """
        holder = holder_of(self._folders)
        if (holder is None or holder.state != "alive") and await self._take_over():
            holder = holder_of(self._folders)
        if holder is None:
            raise NoHolder("nobody holds the workspace yet")
        _check_joinable(holder)
        return await connect(
            self._folders.own,
            holder.socket,
            self._operations,
            self._hello(),
            seconds=greeting_s,
            lost=self._lost,
        )

    def _found(self, search: asyncio.Task[Connection]) -> None:
        if self._search is not search:
            return  # it is known already, and another may be under way
        self._search = None
        if not search.cancelled() and search.exception() is None and self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._watch_holder())

    async def _watch_holder(self) -> None:
        """A holder that is paused keeps its connections and answers nothing: leave it, so that it is replaced."""
        while True:
            await asyncio.sleep(_LOOK_S)
            connection = self._connection
            if connection is None or connection.lost is not None:
                continue
            try:
                holder = await asyncio.to_thread(holder_of, self._folders)
            except StartError as error:
                logger.warning("who holds the workspace cannot be seen: %s", error)
                continue
            if holder is None or holder.token != connection.about["token"]:
                # Somebody was quicker, and may be gone again: the one at the other end is paused, or about to see it.
                connection.drop("another process has taken over the workspace", quietly=True)
            elif holder.state != "alive":
                connection.drop(f"the process that holds the workspace is {holder.state}", quietly=True)

    def _lost(self, reason: str) -> None:
        """Look for the next holder at once, also when nobody asks for anything: somebody has to take over."""
        if self._closed:
            return
        logger.info("the process that held the workspace is gone: %s", reason)
        self.begin(self._rejoin())

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Have something done that nobody waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _rejoin(self) -> None:
        try:
            await self.connection()
        except HandrailError as error:
            logger.warning("no other process could be joined: %s", error)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _check_joinable(holder: Holder) -> None:
    if not holder.socket:
        # Also one of whom nothing is known yet, as it has only just begun.
        raise NoHolder(f"the workspace is in use by {holder}, which cannot be joined; stop that process")


def _told(error: NotLetIn) -> str:
    """The holder's own words."""
    return str(error).removeprefix("Connection rejected: ")
