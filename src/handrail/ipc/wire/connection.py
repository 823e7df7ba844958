"""One connection between two processes of the same user: requests, answers, notices and cancellations, both ways.

Four kinds of message, each a JSON object:

    {"id": 7, "op": "call", "body": …}                       a request
    {"id": 7, "ok": …}   {"id": 7, "error": {"kind", "text"}}  its answer
    {"op": "progress", "body": …}                            a notice, which nobody answers
    {"cancel": 7}                                            whoever asked 7 stopped waiting

and ``{"bye": reason}`` before a connection is dropped. Ids grow, each side counting its own. What a peer may ask for is a
closed table. Nothing that a peer sends raises through the event loop: it is answered, or the connection is dropped
with a reason that is logged.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, cast

from handrail.contract.errors import HandrailError, UsageError
from handrail.ipc.wire.framing import MAX_FRAME, Inbox, Message, TooLong, frame
from handrail.ipc.wire.operations import Desk, Operations, Refused, logger

MAX_OWED = 2 * MAX_FRAME
"""Bytes that may be queued for a peer that does not read, before it is dropped."""

BEHIND = 1024 * 1024
"""Queued bytes from which on a peer counts as behind: then notices that may be lost are not sent."""

_CLOSING_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end, as the operating system knows it. ``pid`` is 0 in another pid namespace."""

    pid: int
    uid: int


if sys.platform == "linux":

    def peer_of(connected: socket.socket) -> Peer:
        """Who is at the other end.

        :raises OSError: when the system does not say
        """
        pid, uid, _gid = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return Peer(pid, uid)

else:  # pragma: no cover - exercised elsewhere only

    def peer_of(connected: socket.socket) -> Peer:
        """Who is at the other end. Not known on this system, so nobody joins."""
        raise OSError("this system does not tell who is at the other end of a socket")


def foreign(peer: Peer) -> str | None:
    """Why this peer is not spoken to; None for the same user."""
    if peer.uid == os.geteuid():
        return None
    return f"it belongs to user {peer.uid}, this process to user {os.geteuid()}; only the same user can join"


class ConnectionLost(HandrailError):
    """The connection to the peer is lost. Whether it did what it was asked is unknown, unless :attr:`sent` is False.

    :param sent: False when the request never left this process
    """

    def __init__(self, reason: str, *, sent: bool = True) -> None:
        super().__init__(f"the connection to the other Handrail process was lost: {reason}")
        self.sent = sent


class Gate(Protocol):
    """Handles a connection until both sides have greeted; see :mod:`handrail.ipc.wire.meeting`."""

    def begun(self, connection: Connection) -> None: ...
    def heard(self, connection: Connection, message: Message) -> None: ...
    def lost(self, reason: str) -> None: ...


class Connection(asyncio.BufferedProtocol):
    """One end of the wire. Made by :func:`handrail.ipc.wire.meeting.connect` and ``listen``.

    :param operations: what the other side may ask for
    :param gate: hears everything until it calls :meth:`open`; None: open from the start
    """

    def __init__(self, operations: Operations | None = None, gate: Gate | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._desk = Desk(operations or Operations(), self._reply)
        self._gate = gate
        self._take_in(Inbox())
        self._transport: asyncio.Transport | None = None
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._waiting: deque[tuple[bytes, bool]] = deque()
        self._owed = 0
        self._behind = False
        self._next_id = 1
        self._latest_id = 0
        self.lost: str | None = None
        """Why the connection is lost or closing; None while it is open."""
        self._when_lost: list[Callable[[str], None]] = []
        self.closed = asyncio.Event()
        """Set when the connection has ended, whoever ended it."""
        self.about: Message = {}
        """What the other side said of itself when greeting."""
        self.peer: Peer | None = None
        """The process at the other end, once it has greeted."""
        self.left_out = 0
        """Notices not sent because the peer was behind."""

    @property
    def transport(self) -> asyncio.Transport:
        if self._transport is None:
            raise UsageError("the connection has not begun yet")
        return self._transport

    @property
    def open_requests(self) -> int:
        """Requests of the peer that are not answered yet."""
        return len(self._desk)

    def when_lost(self, call: Callable[[str], None]) -> None:
        """Have ``call`` called with the reason, at once when the connection is lost, before handlers are cancelled."""
        self._when_lost.append(call)

    # -- asking

    async def request(self, op: str, body: Any = None, *, settle: bool = False) -> Any:
        """Ask the other side and wait for its answer. Requests leave in the order of these calls.

        Cancelling the wait tells the other side, which cancels its handler.

        :param settle: when cancelled, wait until the other side's handler has ended before going on
        :raises Refused: when it will not
        :raises ConnectionLost: when it goes away, or has gone
        """
        number, answer = self.ask(op, body)
        try:
            return await answer
        except asyncio.CancelledError:
            await self.give_up(number, settle=settle)
            raise

    def ask(self, op: str, body: Any) -> tuple[int, asyncio.Future[Any]]:
        """The first half of :meth:`request`: the number of the request that was sent, and its answer to come. Whoever is
        cancelled while waiting for it calls :meth:`give_up`."""
        if self.lost is not None:
            raise ConnectionLost(self.lost, sent=False)
        if self._gate is not None:
            raise UsageError("the two sides have not greeted yet")
        number = self._next_id
        try:
            data = frame({"id": number, "op": op, "body": body})
        except TooLong as error:
            raise Refused("limit", f"{error}; pass less, or a path to a file") from None
        self._next_id = number + 1
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._pending[number] = answer
        self._send(data)
        return number, answer

    async def give_up(self, number: int, *, settle: bool) -> None:
        """Tell the other side that nobody waits for its answer any more.

        :param settle: see :meth:`request`
        """
        if self._pending.pop(number, None) is not None and self.lost is None:
            self._send(frame({"cancel": number}))
            if settle:
                await self._settled(number)

    def notify(self, op: str, body: Any = None, *, may_be_left_out: bool = False) -> bool:
        """Tell the other side something; returns whether it is on its way.

        :param may_be_left_out: not sent to a peer that is behind, and counted in :attr:`left_out`
        """
        if self.lost is not None or self._gate is not None:
            return False
        if may_be_left_out and (self._behind or self._waiting):
            self.left_out += 1
            return False
        try:
            data = frame({"op": op, "body": body})
        except TooLong as error:
            raise Refused("limit", str(error)) from None
        self._send(data, owed=True)
        return self.lost is None

    async def aclose(self, reason: str = "it was closed") -> None:
        """Send what is waiting, close, and return when it is closed. Twice is once."""
        if self.lost is None:
            self._say_bye(reason)
            self._end(reason)
            if self._transport is not None:
                while self._waiting:
                    self._transport.write(self._waiting.popleft()[0])
                self._transport.close()
        if not self.closed.is_set() and self._transport is not None:
            late = self._loop.call_later(_CLOSING_SECONDS, self._transport.abort)
            try:
                await self.closed.wait()
            finally:
                late.cancel()

    # -- for the gate

    def open(self, operations: Operations, about: Message) -> None:
        """Both sides have greeted: from now on messages are requests, answers and notices."""
        self._desk.operations = operations
        self.about = about
        self._gate = None
        self._inbox.limit = MAX_FRAME

    def limit(self, max_frame: int) -> None:
        """Take no message longer than this, in bytes, until :meth:`open`."""
        self._inbox.limit = max_frame

    def say(self, message: Message) -> None:
        """Send a message of the greeting."""
        if self.lost is None:
            self.transport.write(frame(message))

    def drop(self, reason: str, *, quietly: bool = False) -> None:
        """End the connection now, telling the peer why as far as it reads. Never raises."""
        if self.lost is not None:
            return
        if not quietly:
            logger.warning("a connection was dropped: %s", reason)
            self._say_bye(reason)
        self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    # -- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=BEHIND)
        if self.lost is not None:  # given up before it began
            self._transport.abort()
        elif self._gate is not None:
            try:
                self._gate.begun(self)
            except Exception:
                logger.exception("a greeting failed")
                self.drop("the greeting failed", quietly=True)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._inbox.room(sizehint)

    def _take_in(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self.get_buffer = inbox.room  # itself: it is asked for each time that something arrives

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for message in self._inbox.filled(nbytes):
                if self.lost is not None:
                    return
                if self._gate is None:
                    self._heard(message)
                else:
                    self._gate.heard(self, message)
            if self._inbox.fault is not None:
                self.drop(f"{self._inbox.fault}; the other end is no Handrail process, or a faulty one")
        except Exception:
            logger.exception("a message could not be dealt with")
            self.drop("a message could not be dealt with", quietly=True)

    def eof_received(self) -> bool:
        half = self._inbox.unfinished
        self._end("the other side closed it" + (" in the middle of a message" if half else ""))
        self.transport.abort()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(str(exc) if exc else "the other side closed it")
        self._take_in(Inbox())
        self._waiting.clear()
        self.closed.set()

    def pause_writing(self) -> None:
        self._behind = True

    def resume_writing(self) -> None:
        self._behind = False
        while self._waiting and not self._behind:
            data, owed = self._waiting.popleft()
            if owed:
                self._owed -= len(data)
            self.transport.write(data)

    # -- what arrives

    def _heard(self, message: Message) -> None:
        name = message.get("op")
        number = message.get("id")
        if type(name) is str:
            if number is None:
                self._desk.told(name, message.get("body"))
            elif type(number) is int and number > self._latest_id:
                self._latest_id = number
                self._desk.asked(number, name, message.get("body"))
            else:
                shown = number if type(number) is int else f"of type {type(number).__name__}"
                self.drop(f"a request came with an id {shown} after {self._latest_id}; ids are numbers and grow")
        elif number is not None and type(number) is int:
            self._answered(number, message)
        elif type(cancelled := message.get("cancel")) is int:
            self._desk.cancel(cancelled)
        elif type(reason := message.get("bye")) is str:
            self._end(f"the other side ended it: {reason[:500]}")
            self.transport.abort()
        else:
            self.drop(
                f"a message is none of request, answer, notice and cancel: it has {[key[:40] for key in islice(message, 5)]}"
            )

    def _answered(self, number: int, message: Message) -> None:
        answer = self._pending.pop(number, None)
        if answer is None:
            if not 0 < number < self._next_id:
                self.drop(f"an answer came to a request that was never made ({number})")
            return  # else: to one that nobody waits for any more
        if answer.done():
            return
        if "ok" in message:
            answer.set_result(message["ok"])
            return
        error: Any = message.get("error")
        told = cast("Message", error) if isinstance(error, dict) else {}
        kind, text = told.get("kind"), told.get("text")
        if type(kind) is str and type(text) is str:
            answer.set_exception(Refused(kind, text))
        else:
            self._pending[number] = answer
            self.drop(f"the answer to request {number} holds neither a result nor an error")

    def _reply(self, message: Message) -> None:
        if self.lost is not None:
            return
        try:
            data = frame(message)
        except TooLong as error:
            data = frame(
                {"id": message["id"], "error": {"kind": "limit", "text": f"the answer cannot be sent: {error}"}}
            )
        self._send(data, owed=True)

    # -- what leaves

    def _send(self, data: bytes, *, owed: bool = False) -> None:
        """Write it, or keep it until the peer has read more. What a peer makes us owe it is bounded."""
        if not self._behind and not self._waiting and self._transport is not None:
            self._transport.write(data)
            return
        self._waiting.append((data, owed))
        if owed:
            self._owed += len(data)
            if self._owed > MAX_OWED:
                self.drop(f"it did not read {self._owed:,} bytes that wait for it")

    def _say_bye(self, reason: str) -> None:
        if self._transport is not None and not self._waiting:
            self._transport.write(frame({"bye": reason[:500]}))

    async def _settled(self, number: int) -> None:
        ended: asyncio.Future[Any] = self._loop.create_future()
        self._pending[number] = ended
        try:
            await ended
        except (Refused, ConnectionLost):
            pass
        finally:
            self._pending.pop(number, None)

    def _end(self, reason: str) -> None:
        """From here on the connection is lost for everybody on this side; what closes the socket comes after."""
        if self.lost is not None:
            return
        self.lost = reason
        pending, self._pending = self._pending, {}
        for answer in pending.values():
            if not answer.done():
                answer.set_exception(ConnectionLost(reason))
        if self._gate is not None:
            self._gate.lost(reason)
        for call in self._when_lost:
            try:
                call(reason)
            except Exception:
                logger.exception("a loss could not be dealt with")
        self._desk.lost()
