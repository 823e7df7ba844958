"""The client's connection to the current lease holder. If it is lost, the client connects to the next lease holder.

If the lease holder disconnects, one of its clients takes its place: it assembles the kernel in its own process. All clients,
including this process, connect to that kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from handrail.contract.errors import HandrailError, StartError, UsageError
from handrail.ipc.codec.wire_encoding import restore_error
from handrail.ipc.wire.message_frames import Message
from handrail.ipc.wire.operation_dispatch import LEAVING, OperationTable, RemoteRequestError
from handrail.ipc.wire.peer_connection import ConnectionLost, IpcConnection
from handrail.ipc.wire.socket_handshake import (
    ConnectionRejected,
    LeaseHolderNotResponding,
    NoLeaseHolder,
    connect_to_lease_holder,
)
from handrail.store.lease import LeaseHolder, find_lease_holder
from handrail.store.state_folders import StateFolders

logger = logging.getLogger("handrail.ipc")

_CLOSED_TEXT = "This kernel is closed. Open a new one."
_RETRY_S = 0.05
_WATCH_INTERVAL_S = 0.5
"""How often the lease holder is checked while a request waits for its answer."""
_IDLE_WATCH_INTERVAL_S = 5.0
"""How often it is checked while no request waits. Each check wakes a process that does nothing otherwise."""
_SEARCH_TIMEOUT_S = 10.0
"""The maximum wait for the next lease holder."""
_GREETING_TIMEOUT_S = 1.0
"""The time limit for the handshake. A paused lease holder does not answer, and is replaced two seconds after its last sign of
life. A slow one gets more time from the third attempt on: otherwise, on a busy machine, every attempt would end just before
the answer."""
_SLOW_TIMEOUT_S = 30.0
"""The maximum total delay of a slow lease holder."""


class ReconnectingClient:
    """A client connection to the current lease holder, which reconnects to the next one.

    :param take_over: tries to take the workspace over in this process; returns whether it holds it now
    :param hello: returns the greeting with the registrations of this process
    :param operations: the operations that a lease holder may request
    """

    def __init__(
        self,
        folders: StateFolders,
        take_over: Callable[[], Awaitable[bool]],
        hello: Callable[[], Message],
        operations: OperationTable,
    ) -> None:
        self._folders = folders
        self._take_over = take_over
        self._hello = hello
        self._operations = operations
        self._connection: IpcConnection | None = None
        self._search: asyncio.Task[IpcConnection] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._request_sent = asyncio.Event()
        self.token: int = 0
        """The fencing token of the last lease holder, which identifies it."""
        self.on_connected: list[Callable[[IpcConnection], Awaitable[None]]] = []
        """The callbacks that are awaited with each new connection, before the first request."""

    async def wait_for_connection(self) -> IpcConnection:
        """Return the connection to the current lease holder. If it is lost, wait for the next lease holder.

        :raises StartError: if there is no lease holder within the time limit
        :raises UsageError: if this kernel is closed
        """
        if self._closed:
            raise UsageError(_CLOSED_TEXT)
        if self._search is not None and self._search.done():
            # The loop has not run the callback yet. A caller that retries in a loop would never let it run.
            self._end_search(self._search)
        if self._search is None and self.current_connection is not None:
            return self.current_connection
        if self._search is None:
            self._search = asyncio.get_running_loop().create_task(self._connect())
            self._search.add_done_callback(self._end_search)
        search = self._search
        try:
            # One search serves all waiting callers, so the cancellation of one must not end it.
            return await asyncio.shield(search)
        except asyncio.CancelledError:
            if search.cancelled() and not _is_cancelled():  # the kernel was closed, not this task
                raise UsageError(_CLOSED_TEXT) from None
            raise

    @property
    def current_connection(self) -> IpcConnection | None:
        """The connection to the current lease holder; None if it is lost."""
        return None if self._connection is None or self._connection.lost_reason is not None else self._connection

    async def request(self, op: str, body: Any = None, *, settle: bool = False, repeatable: bool = False) -> Any:
        """Send a request to the lease holder.

        If it did not reach the lease holder, or was refused because of a shutdown, it is sent to the next one.

        :param settle: if cancelled, wait until the handler of the lease holder has ended
        :param repeatable: the request is idempotent: send it again even if the last lease holder may have done it
        :raises ConnectionLost: if the connection is lost after the request was sent, unless it is ``repeatable``
        :raises HandrailError: the error of the lease holder
        """
        while True:
            connection = self._connection
            if connection is None or connection.lost_reason is not None or self._search is not None or self._closed:
                connection = await self.wait_for_connection()
            try:
                number, answer = connection.send_request(op, body)
                self._request_sent.set()
                try:
                    return await answer
                except asyncio.CancelledError:
                    await connection.cancel_request(number, settle=settle)
                    raise
            except ConnectionLost as lost:
                # The holder may have run the request before the connection ended. Only a request without effect may be
                # sent twice.
                if lost.sent and not repeatable:
                    raise
            except RemoteRequestError as refused:
                if refused.kind != LEAVING:
                    raise restore_error(refused) from None
                # The holder is leaving. Its connection ends before the next holder can be found.
                await connection.closed.wait()

    def notify(self, op: str, body: Mapping[str, Any]) -> None:
        """Send a notification to the current lease holder, if any.

        Callbacks in :attr:`on_connected` repeat lasting ones.
        """
        if self._connection is not None:
            self._connection.notify(op, body)

    async def aclose(self) -> None:
        """Disconnect. The lease holder suspends the sessions of this process after their calls have ended."""
        self._closed = True
        ending: list[asyncio.Task[Any]] = [task for task in (self._search, self._watch) if task is not None]
        ending += self._tasks
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        if self._connection is not None:
            await self._connection.aclose("the client process is shutting down")

    async def _connect(self) -> IpcConnection:
        loop = asyncio.get_running_loop()
        began = loop.time()
        deadline, late = began + _SEARCH_TIMEOUT_S, 0
        while True:
            greeting_s, asked = _GREETING_TIMEOUT_S * 2 ** max(0, late - 1), loop.time()
            try:
                connection = await self._try_connect(greeting_s)
            except NoLeaseHolder as error:
                problem = str(error)
            except LeaseHolderNotResponding as error:
                problem = str(error)
                deadline, late = began + _SLOW_TIMEOUT_S, late + (loop.time() - asked >= greeting_s)
            except ConnectionRejected as error:
                if error.kind != LEAVING:
                    refusal_error = restore_error(RemoteRequestError(error.kind, error.holder_text))
                    raise (error if isinstance(refusal_error, RemoteRequestError) else refusal_error) from None
                problem = str(error)
            else:
                # From here on, notifications go to this lease holder; the callbacks repeat the earlier ones.
                self._connection = connection
                self.token = connection.peer_greeting["token"]
                try:
                    for joined in tuple(self.on_connected):
                        await joined(connection)
                except (
                    ConnectionLost,
                    RemoteRequestError,
                ) as error:  # this lease holder has disconnected, or is shutting down
                    problem = str(error)
                    connection.drop("the connection attempt failed", quietly=True)
                else:
                    return connection
            if loop.time() >= deadline:
                raise StartError(
                    f"No process has answered for the workspace {self._folders.workspace} for "
                    f"{deadline - began:g} s. Last problem: {problem} Check the other Handrail processes of the workspace, then try again."
                )
            await asyncio.sleep(_RETRY_S)

    async def _try_connect(self, greeting_s: float) -> IpcConnection:
        """Connect to the current lease holder, or take the workspace over and connect to this process.

        :param greeting_s: the time limit for the handshake
        :raises StartError: if both failed
        """
        holder = find_lease_holder(self._folders)
        # This process may become the holder itself. It then connects to itself like any other client.
        if (holder is None or holder.state != "alive") and await self._take_over():
            holder = find_lease_holder(self._folders)
        if holder is None:
            raise NoLeaseHolder("No process holds the workspace yet. Try again.")
        _check_connectable(holder)
        return await connect_to_lease_holder(
            self._folders.workspace_state_folder,
            holder.socket,
            self._operations,
            self._hello(),
            seconds=greeting_s,
            lost=self._handle_loss,
        )

    def _end_search(self, search: asyncio.Task[IpcConnection]) -> None:
        if self._search is not search:
            return  # handled already; another search may be running
        self._search = None
        if not search.cancelled() and search.exception() is None and self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._watch_lease_holder())

    async def _watch_lease_holder(self) -> None:
        """Drop the connection to a paused lease holder, so that it is replaced.

        A paused process keeps its connections but does not answer.
        """
        while True:
            if (connection := self._connection) is not None and connection.has_pending_requests:
                await asyncio.sleep(_WATCH_INTERVAL_S)
            else:
                # Without requests, a paused holder harms no caller, so the check can be rare.
                self._request_sent.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._request_sent.wait(), _IDLE_WATCH_INTERVAL_S)
                    await asyncio.sleep(_WATCH_INTERVAL_S)
            if (connection := self._connection) is None or connection.lost_reason is not None:
                continue
            try:
                holder = find_lease_holder(self._folders)
            except StartError as error:
                logger.warning("cannot read the lease holder of the workspace: %s", error)
                continue
            if holder is None or holder.token != connection.peer_greeting["token"]:
                # Another process took over, and may have ended again. The peer is paused, or has not noticed yet.
                connection.drop("another process has taken over the workspace", quietly=True)
            elif holder.state != "alive":
                connection.drop(f"the process that holds the workspace is {holder.state}", quietly=True)

    def _handle_loss(self, reason: str) -> None:
        """Search for the next lease holder immediately, even without requests: one process must take over."""
        if self._closed:
            return
        logger.info("the process that held the workspace has disconnected: %s", reason)
        self.start_background_task(self._reconnect())

    def start_background_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reconnect(self) -> None:
        try:
            await self.wait_for_connection()
        except HandrailError as error:
            logger.warning("cannot connect to another process: %s", error)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _check_connectable(holder: LeaseHolder) -> None:
    if not holder.socket:
        # This includes a process that has just started and has no known socket yet.
        raise NoLeaseHolder(
            f"The workspace is in use by {holder}, which does not accept connections. Stop that process, then try again."
        )
