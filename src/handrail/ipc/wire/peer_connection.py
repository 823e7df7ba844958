"""One connection between two processes of the same user: requests, answers, notifications and cancellations, both ways.

There are four kinds of message, each a JSON object:

    {"id": 7, "op": "call", "body": …}                       a request
    {"id": 7, "ok": …}   {"id": 7, "error": {"kind", "text"}}  its answer
    {"op": "progress", "body": …}                            a notification, which has no answer
    {"cancel": 7}                                            the sender of request 7 stopped waiting

and ``{"bye": reason}`` before a connection is dropped. Ids increase; each side counts its own. The operations that a peer may
request are a closed table. No message of a peer raises through the event loop: the kernel answers it, or drops the connection
and logs the reason.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any, Protocol, cast

from handrail.contract.errors import HandrailError, UsageError
from handrail.contract.struct import Struct
from handrail.ipc.wire.message_frames import MAX_FRAME, FrameReceiveBuffer, FrameTooLong, Message, encode_frame
from handrail.ipc.wire.operation_dispatch import OperationTable, RemoteRequestError, RequestDispatcher, logger

MAX_QUEUED_BYTES = 2 * MAX_FRAME
"""The maximum number of queued bytes for a peer that does not read. Beyond it, the connection is dropped."""

BACKLOG_BYTES = 1024 * 1024
"""The number of queued bytes from which a peer counts as behind: optional notifications are then not sent."""

_CLOSING_SECONDS = 2.0


class PeerCredentials(Struct, frozen=True):
    """The process at the other end, as reported by the operating system.

    ``pid`` is 0 in another pid namespace.
    """

    pid: int
    uid: int


if sys.platform == "linux":

    def read_peer_credentials(connected: socket.socket) -> PeerCredentials:
        """Return the process at the other end.

        :raises OSError: if the system does not report it
        """
        pid, uid, _gid = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return PeerCredentials(pid, uid)

else:  # pragma: no cover - exercised elsewhere only

    def read_peer_credentials(connected: socket.socket) -> PeerCredentials:
        """Raise OSError: this system does not report the process at the other end."""
        raise OSError("this system does not report the process at the other end of a socket")


def explain_user_mismatch(peer: PeerCredentials) -> str | None:
    """Return why this peer is rejected, or None if it belongs to the same user."""
    if peer.uid == os.geteuid():
        return None
    return (
        f"The other process belongs to user {peer.uid}, this process to user {os.geteuid()}. "
        "Only processes of the same user can connect."
    )


class ConnectionLost(HandrailError):
    """The connection to the peer was lost.

    Unless :attr:`sent` is False, it is unknown whether the peer did the request.

    :param sent: False if the request never left this process
    """

    def __init__(self, reason: str, *, sent: bool = True) -> None:
        super().__init__(f"The connection to the other Handrail process was lost: {reason}")
        self.sent = sent


class HandshakeHandler(Protocol):
    """The handler of a connection during the handshake; see :mod:`handrail.ipc.wire.socket_handshake`."""

    def start(self, connection: IpcConnection) -> None: ...
    def receive(self, connection: IpcConnection, message: Message) -> None: ...
    def end(self, reason: str) -> None: ...


class IpcConnection(asyncio.BufferedProtocol):
    """One end of a connection, created by :func:`handrail.ipc.wire.socket_handshake.connect_to_lease_holder` and by the listener.

    :param operations: the operations that the other side may request
    :param gate: receives all messages until it calls :meth:`finish_handshake`; None: no handshake
    """

    def __init__(self, operations: OperationTable | None = None, gate: HandshakeHandler | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._dispatcher = RequestDispatcher(operations or OperationTable(), self._reply)
        self._handshake = gate
        self._set_buffer(FrameReceiveBuffer())
        self._transport: asyncio.Transport | None = None
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._write_queue: deque[tuple[bytes, bool]] = deque()
        self._queued_bytes = 0
        self._is_backlogged = False
        self._next_id = 1
        self._latest_id = 0
        self.lost_reason: str | None = None
        """The reason why the connection is lost or closing; None while it is open."""
        self._loss_callbacks: list[Callable[[str], None]] = []
        self.closed = asyncio.Event()
        """Set when the connection has ended, on either side."""
        self.peer_greeting: Message = {}
        """The greeting of the other side."""
        self.peer: PeerCredentials | None = None
        """The process at the other end, after the handshake."""
        self.skipped_notifications = 0
        """The number of notifications not sent because the peer was behind."""

    @property
    def transport(self) -> asyncio.Transport:
        if self._transport is None:
            raise UsageError("The connection is not established yet. Wait for the handshake first.")
        return self._transport

    @property
    def unanswered_peer_request_count(self) -> int:
        return len(self._dispatcher)

    def add_loss_callback(self, call: Callable[[str], None]) -> None:
        """Call ``call`` with the reason when the connection is lost, before handlers are cancelled."""
        self._loss_callbacks.append(call)

    # -- asking

    async def request(self, op: str, body: Any = None, *, settle: bool = False) -> Any:
        """Send a request and wait for its answer. Requests are sent in the order of these calls.

        If the wait is cancelled, the other side cancels its handler.

        :param settle: if cancelled, wait until the other side's handler has ended
        :raises RemoteRequestError: if the other side refuses the request
        :raises ConnectionLost: if the connection is or was lost
        """
        number, answer = self.send_request(op, body)
        try:
            return await answer
        except asyncio.CancelledError:
            await self.cancel_request(number, settle=settle)
            raise

    @property
    def has_pending_requests(self) -> bool:
        """Whether a request waits for its answer."""
        return bool(self._pending)

    def send_request(self, op: str, body: Any) -> tuple[int, asyncio.Future[Any]]:
        """Send a request, and return its number and the future of its answer.

        This is the first half of :meth:`request`. If you are cancelled while you wait for the answer, call :meth:`cancel_request`.
        """
        if self.lost_reason is not None:
            raise ConnectionLost(self.lost_reason, sent=False)
        if self._handshake is not None:
            raise UsageError("The handshake is not finished yet. Wait for it first.")
        number = self._next_id
        try:
            data = encode_frame({"id": number, "op": op, "body": body})
        except FrameTooLong as error:
            raise RemoteRequestError(
                "limit", f"Request too large: {error}. Pass less data, or the path of a file."
            ) from None
        self._next_id = number + 1
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._pending[number] = answer
        self._send(data)
        return number, answer

    async def cancel_request(self, number: int, *, settle: bool) -> None:
        """Tell the other side to cancel a request, because its answer is no longer needed.

        :param settle: see :meth:`request`
        """
        # The answer may have arrived already. Then nothing is left to cancel.
        if self._pending.pop(number, None) is not None and self.lost_reason is None:
            self._send(encode_frame({"cancel": number}))
            if settle:
                await self._wait_for_handler(number)

    def notify(self, op: str, body: Any = None, *, skip_when_behind: bool = False) -> bool:
        """Send a notification, and return whether it was sent.

        :param skip_when_behind: do not send it to a peer that is behind, but count it in :attr:`skipped_notifications`
        """
        if self.lost_reason is not None or self._handshake is not None:
            return False
        # A slow reader of events must not slow down the calls of others, so it misses some.
        if skip_when_behind and (self._is_backlogged or self._write_queue):
            self.skipped_notifications += 1
            return False
        try:
            data = encode_frame({"op": op, "body": body})
        except FrameTooLong as error:
            raise RemoteRequestError("limit", f"Notification too large: {error}. Send less data.") from None
        self._send(data, owed=True)
        return self.lost_reason is None

    async def aclose(self, reason: str = "it was closed") -> None:
        """Send the queued messages and close the connection. Further calls have no effect."""
        if self.lost_reason is None:
            self._send_bye(reason)
            self._mark_lost(reason)
            if self._transport is not None:
                # The last answers must arrive even if the peer is behind. The timer below limits how long that may
                # take.
                while self._write_queue:
                    self._transport.write(self._write_queue.popleft()[0])
                self._transport.close()
        if not self.closed.is_set() and self._transport is not None:
            late = self._loop.call_later(_CLOSING_SECONDS, self._transport.abort)
            try:
                await self.closed.wait()
            finally:
                late.cancel()

    # -- for the handshake

    def finish_handshake(self, operations: OperationTable, about: Message) -> None:
        """End the handshake: from now on messages are requests, answers and notifications."""
        self._dispatcher.operations = operations
        self.peer_greeting = about
        self._handshake = None
        # The small limit of the handshake protects from strangers. An accepted peer may send large results.
        self._frames.limit = MAX_FRAME

    def limit_frame_size(self, max_frame: int) -> None:
        """Limit the size of messages, in bytes, until :meth:`finish_handshake`."""
        self._frames.limit = max_frame

    def send_handshake_message(self, message: Message) -> None:
        if self.lost_reason is None:
            self.transport.write(encode_frame(message))

    def drop(self, reason: str, *, quietly: bool = False) -> None:
        """End the connection immediately. The peer receives the reason, if it still reads. Never raises.

        :param quietly: do not log the reason and do not send it
        """
        if self.lost_reason is not None:
            return
        if not quietly:
            logger.warning("dropped a connection: %s", reason)
            self._send_bye(reason)
        self._mark_lost(reason)
        if self._transport is not None:
            self._transport.abort()

    # -- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # asyncio's own limit of 64 KiB would report nearly every large result as a backlog.
        self._transport.set_write_buffer_limits(high=BACKLOG_BYTES)
        if self.lost_reason is not None:  # dropped before it was established
            self._transport.abort()
        elif self._handshake is not None:
            try:
                self._handshake.start(self)
            except Exception:
                logger.exception("a handshake failed")
                self.drop("the handshake failed", quietly=True)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._frames.get_buffer(sizehint)

    def _set_buffer(self, inbox: FrameReceiveBuffer) -> None:
        self._frames = inbox
        self.get_buffer = inbox.get_buffer  # without a wrapper: asyncio calls it for each read

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for message in self._frames.read_messages(nbytes):
                if self.lost_reason is not None:
                    return
                if self._handshake is None:
                    self._receive(message)
                else:
                    self._handshake.receive(self, message)
            if self._frames.fault is not None:
                self.drop(f"{self._frames.fault}; the other end is not a Handrail process, or is defective")
        except Exception:
            logger.exception("the handling of a message failed")
            self.drop("the handling of a message failed", quietly=True)

    def eof_received(self) -> bool:
        half = self._frames.pending_byte_count
        self._mark_lost("the other side closed it" + (" in the middle of a message" if half else ""))
        self.transport.abort()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._mark_lost(str(exc) if exc else "the other side closed it")
        self._set_buffer(FrameReceiveBuffer())
        self._write_queue.clear()
        self.closed.set()

    def pause_writing(self) -> None:
        self._is_backlogged = True

    def resume_writing(self) -> None:
        self._is_backlogged = False
        while self._write_queue and not self._is_backlogged:
            data, owed = self._write_queue.popleft()
            if owed:
                self._queued_bytes -= len(data)
            self.transport.write(data)

    # -- what arrives

    def _receive(self, message: Message) -> None:
        name = message.get("op")
        number = message.get("id")
        if type(name) is str:
            if number is None:
                self._dispatcher.handle_notification(name, message.get("body"))
            # A repeated number could deliver the answer of one request to another.
            elif type(number) is int and number > self._latest_id:
                self._latest_id = number
                self._dispatcher.handle_request(number, name, message.get("body"))
            else:
                shown = number if type(number) is int else f"of type {type(number).__name__}"
                self.drop(f"invalid request id: {shown} after {self._latest_id}; ids must be increasing numbers")
        elif number is not None and type(number) is int:
            self._receive_answer(number, message)
        elif type(cancelled := message.get("cancel")) is int:
            self._dispatcher.cancel_request_handler(cancelled)
        elif type(reason := message.get("bye")) is str:
            self._mark_lost(f"the other side ended it: {reason[:500]}")
            self.transport.abort()
        else:
            self.drop(
                "a message is not a request, answer, notification or cancellation: "
                f"its keys are {[key[:40] for key in islice(message, 5)]}"
            )

    def _receive_answer(self, number: int, message: Message) -> None:
        answer = self._pending.pop(number, None)
        if answer is None:
            # The request was never sent, so the peer is confused, and every further answer is suspect.
            if not 0 < number < self._next_id:
                self.drop(f"an answer refers to an unknown request: {number}")
            return  # otherwise the request was cancelled
        if answer.done():
            return
        if "ok" in message:
            answer.set_result(message["ok"])
            return
        error: Any = message.get("error")
        fields = cast("Message", error) if isinstance(error, dict) else {}
        kind, text = fields.get("kind"), fields.get("text")
        if type(kind) is str and type(text) is str:
            answer.set_exception(RemoteRequestError(kind, text))
        else:
            # The request goes back, so that the end of the connection fails it with the others.
            self._pending[number] = answer
            self.drop(f"the answer to request {number} contains neither a result nor an error")

    def _reply(self, message: Message) -> None:
        if self.lost_reason is not None:
            return
        try:
            data = encode_frame(message)
        except FrameTooLong as error:
            data = encode_frame(
                {
                    "id": message["id"],
                    "error": {"kind": "answer_too_large", "text": f"The answer cannot be sent: {error}."},
                }
            )
        self._send(data, owed=True)

    # -- what leaves

    def _send(self, data: bytes, *, owed: bool = False) -> None:
        """Write the data, or queue it until the peer has read more.

        :param owed: count it in the limited queue of answers and notifications
        """
        if not self._is_backlogged and not self._write_queue and self._transport is not None:
            self._transport.write(data)
            return
        # The order of messages must stay, so nothing may overtake the queue.
        self._write_queue.append((data, owed))
        if owed:
            self._queued_bytes += len(data)
            if self._queued_bytes > MAX_QUEUED_BYTES:
                self.drop(f"the other side did not read {self._queued_bytes:,} queued bytes")

    def _send_bye(self, reason: str) -> None:
        # A farewell in the middle of a queued message would break the stream.
        if self._transport is not None and not self._write_queue:
            self._transport.write(encode_frame({"bye": reason[:500]}))

    async def _wait_for_handler(self, number: int) -> None:
        ended: asyncio.Future[Any] = self._loop.create_future()
        self._pending[number] = ended
        try:
            await ended
        except (RemoteRequestError, ConnectionLost):
            pass
        finally:
            self._pending.pop(number, None)

    def _mark_lost(self, reason: str) -> None:
        """Mark the connection as lost for all users on this side. The caller closes the socket afterwards."""
        if self.lost_reason is not None:
            return
        # The reason is set first: the callbacks below may ask whether the connection still works.
        self.lost_reason = reason
        pending, self._pending = self._pending, {}
        for answer in pending.values():
            if not answer.done():
                answer.set_exception(ConnectionLost(reason))
        if self._handshake is not None:
            self._handshake.end(reason)
        for call in self._loss_callbacks:
            try:
                call(reason)
            except Exception:
                logger.exception("a callback for a lost connection failed")
        self._dispatcher.handle_disconnect()
